from __future__ import annotations

import json
import shutil
import unicodedata
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sangam_backend.text import Piece, TextStream, Tokenizer

CHECKPOINTS = Path(__file__).parent.parent / "checkpoints"
FAMILIES = ("llada", "dream")
PLAIN_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="|"))
# Byte tokens, special tokens, and ids past the end of both vocabularies.
BYTE_IDS = st.sampled_from([*b"aab \n", *"é你😀\ufffd".encode(), 0xFF, 0xC0, 256, 258, 260, 300])


def checkpoint(family: str) -> Path:
    return CHECKPOINTS / f"tiny-{family}"


def load(directory: Path, family: str) -> Tokenizer:
    tokenizer = Tokenizer.load(directory, family)
    assert tokenizer is not None
    return tokenizer


def copy_tokenizer(family: str, directory: Path) -> Path:
    ignore = shutil.ignore_patterns("*.safetensors")
    return Path(shutil.copytree(checkpoint(family), directory / family, ignore=ignore))


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def add_merges(path: Path, merges: list[tuple[str, str]]) -> None:
    data = json.loads(path.read_text())
    vocabulary = data["model"]["vocab"]
    vocabulary |= {token["content"]: token["id"] for token in data["added_tokens"]}
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    data["model"]["merges"] = [list(pair) for pair in merges]
    path.write_text(json.dumps(data))


def chat(messages: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in messages]


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def tokenizer(family: str) -> Tokenizer:
    return load(checkpoint(family), family)


@pytest.fixture(scope="session")
def llada() -> Tokenizer:
    return load(checkpoint("llada"), "llada")


@pytest.fixture(scope="session")
def dream() -> Tokenizer:
    return load(checkpoint("dream"), "dream")


@pytest.fixture(scope="session")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Tokens of several characters, and tokens that begin and end inside one."""
    directory = copy_tokenizer("llada", tmp_path_factory.mktemp("merged"))
    merges = [("a", "b"), ("ab", "a"), ("b", "b"), ("a", "ä"), ("½", "ł"), ("½ł", "b")]
    add_merges(directory / "tokenizer.json", merges)
    return load(directory, "llada")


def run(stream: TextStream, chunks: Sequence[Sequence[int]]) -> Piece:
    pieces = [stream.push(ids, index == len(chunks) - 1) for index, ids in enumerate(chunks)]
    return Piece("".join(p.text for p in pieces), [token for p in pieces for token in p.ids])


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in pairwise(bounds)]


def stable_ends(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    texts = (tokenizer.decode(ids[: n + 1]) for n in range(len(ids)))
    return [len(text.removesuffix("\ufffd")) for text in texts]


def expected(tokenizer: Tokenizer, ids: list[int], stop: list[str]) -> Piece:
    text = tokenizer.decode(ids)
    cut = min((text.find(s) for s in stop if s in text), default=None)
    if cut is None:
        return Piece(text, ids)
    ends = stable_ends(tokenizer, ids)
    kept = sum(end <= cut for end in ends) + (cut > 0 and cut not in ends)
    return Piece(text[:cut], ids[:kept])


def test_round_trip(tokenizer: Tokenizer) -> None:
    text = "Add 4363 and 75.\n\n  naïve 你好 😀\t\u200b end "
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("4363") == list(b"4363")


@given(text=PLAIN_TEXT)
def test_any_text_round_trips(llada: Tokenizer, text: str) -> None:
    assert llada.decode(llada.encode(text)) == text


@given(text=PLAIN_TEXT)
def test_dream_composes_characters_as_qwen2_does(dream: Tokenizer, text: str) -> None:
    assert dream.decode(dream.encode(text)) == unicodedata.normalize("NFC", text)


def test_spaces_are_left_alone(tokenizer: Tokenizer) -> None:
    text = "a , b . c ' s"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_long_text_is_not_truncated(tokenizer: Tokenizer) -> None:
    text = "ab " * 2000
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens(tokenizer: Tokenizer, family: str) -> None:
    config = json.loads((checkpoint(family) / "config.json").read_text())
    mask, end, size = {
        "llada": ("<|mdm_mask|>", "<|eot_id|>", 830),
        "dream": ("<|mask|>", "<|im_end|>", 261),
    }[family]
    assert tokenizer.encode(mask) == [config["mask_token_id"]]
    assert tokenizer.encode("<|endoftext|>") == [config["eos_token_id"]]
    assert tokenizer.stop_ids == {config["eos_token_id"], *tokenizer.encode(end)}
    assert tokenizer.vocab_size == size <= config["vocab_size"]
    assert tokenizer.decode(tokenizer.encode(f"a{mask}b{end}")) == "ab"


def test_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="surrogate"):
        tokenizer.encode("a\ud800")


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (
            [("user", " Hi ")],
            (
                "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n"
            ),
        ),
        (
            [("system", "S"), ("user", "U"), ("assistant", " A\n")],
            (
                "<|startoftext|><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
                "<|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\nA<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n"
            ),
        ),
    ],
)
def test_llada_chat(llada: Tokenizer, messages: list[tuple[str, str]], text: str) -> None:
    assert llada.encode_chat(chat(messages)) == llada.encode(text)


def test_llada_chat_is_what_the_weights_were_trained_on(llada: Tokenizer) -> None:
    user, assistant = llada.encode("user"), llada.encode("assistant")
    gap, text = llada.encode("\n\n"), llada.encode("Hi")
    ids = [824, 827, *user, 828, *gap, *text, 829, 827, *assistant, 828, *gap]
    assert llada.encode_chat(chat([("user", "Hi")])) == ids


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (
            [("user", " Hi ")],
            (
                "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
                "<|im_start|>user\n Hi <|im_end|>\n<|im_start|>assistant\n"
            ),
        ),
        (
            [("system", "S"), ("user", "U"), ("assistant", "A"), ("user", "V")],
            (
                "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
                "<|im_start|>assistant\nA<|im_end|>\n<|im_start|>user\nV<|im_end|>\n"
                "<|im_start|>assistant\n"
            ),
        ),
    ],
)
def test_dream_chat(dream: Tokenizer, messages: list[tuple[str, str]], text: str) -> None:
    ids = dream.encode_chat(chat(messages))
    assert ids == dream.encode(text)
    assert ids[0] == 257


def test_no_chat_template(family: str, tmp_path: Path) -> None:
    directory = copy_tokenizer(family, tmp_path)
    edit_json(directory / "tokenizer_config.json", chat_template=None)
    with pytest.raises(ValueError, match="no chat template"):
        load(directory, family).encode_chat(chat([("user", "Hi")]))


def test_messages_that_the_template_refuses(family: str, tmp_path: Path) -> None:
    directory = copy_tokenizer(family, tmp_path)
    refusal = "{{ raise_exception('roles must alternate') }}"
    edit_json(directory / "tokenizer_config.json", chat_template=refusal)
    with pytest.raises(ValueError, match="roles must alternate"):
        load(directory, family).encode_chat(chat([("user", "Hi")]))


def test_directory_without_tokenizer(family: str, tmp_path: Path) -> None:
    shutil.copy(checkpoint(family) / "config.json", tmp_path)
    assert Tokenizer.load(tmp_path, family) is None


@pytest.mark.parametrize(
    ("family", "name", "content", "cause"),
    [
        ("llada", "tokenizer.json", "{", "EOF"),
        ("llada", "tokenizer.json", "{}", "Model missing"),
        ("llada", "tokenizer_config.json", "[]", "cannot be loaded"),
        ("dream", "vocab.json", "{", "EOF"),
        ("dream", "vocab.json", "{}", "declared as 256 but loads as 0"),
        ("dream", "merges.txt", "Ā ā ?", "line 1"),
        ("dream", "tokenizer_config.json", "", "line 1"),
    ],
)
def test_broken_file(family: str, name: str, content: str, cause: str, tmp_path: Path) -> None:
    directory = copy_tokenizer(family, tmp_path)
    (directory / name).write_text(content)
    with pytest.raises(ValueError, match=cause) as caught:
        Tokenizer.load(directory, family)
    assert str(directory) in str(caught.value)


@pytest.mark.parametrize(
    ("family", "name"),
    [("llada", "tokenizer.json"), ("dream", "vocab.json"), ("dream", "merges.txt")],
)
def test_missing_file(family: str, name: str, tmp_path: Path) -> None:
    directory = copy_tokenizer(family, tmp_path)
    (directory / name).unlink()
    with pytest.raises(ValueError, match=f"no {name}"):
        Tokenizer.load(directory, family)


def test_dream_runs_no_code_of_the_checkpoint(tmp_path: Path) -> None:
    directory = copy_tokenizer("dream", tmp_path)
    (directory / "tokenization_dream.py").write_text("raise SystemExit('was run')")
    assert load(directory, "dream").encode("ab<|mask|>") == [97, 98, 260]


@pytest.mark.parametrize("character", ["é", "你", "😀"])
def test_a_character_comes_out_whole(tokenizer: Tokenizer, character: str) -> None:
    stream = TextStream(tokenizer, [])
    *head, tail = tokenizer.encode(character)
    assert [stream.push([token], False) for token in head] == [Piece("", [t]) for t in head]
    assert stream.push([tail], False) == Piece(character, [tail])


def test_special_token_inside_a_character(tokenizer: Tokenizer) -> None:
    first, *rest = tokenizer.encode("你")
    special, another = sorted(tokenizer.stop_ids)
    stream = TextStream(tokenizer, [])
    assert stream.push([first, special], False).text == ""
    assert stream.push([another], False).text == ""
    assert stream.push(rest, False).text == "你"


def test_unfinished_character_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, [])
    assert stream.push([97, 0xE4], False).text == "a"
    assert stream.push([0xBD], False).text == ""
    assert stream.push([], True).text == "\ufffd"


def test_invalid_bytes_do_not_pile_up(tokenizer: Tokenizer) -> None:
    sizes: list[int] = []

    class Watched(Tokenizer):
        def __init__(self) -> None: ...

        def decode(self, ids: Sequence[int]) -> str:
            sizes.append(len(ids))
            return tokenizer.decode(ids)

    stream = TextStream(Watched(), [])
    text = "".join(stream.push([0xFF], False).text for _ in range(50))
    assert text + stream.push([], True).text == "\ufffd" * 50
    assert max(sizes) <= 2


def test_stop_string_inside_one_push(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["END"])
    assert stream.push(list(b"one END two"), False) == Piece("one ", list(b"one "))
    assert stream.stopped
    assert stream.push(list(b"more"), True) == Piece("", [])


def test_stop_string_over_several_pushes(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["END"])
    assert stream.push(list(b"one E"), False) == Piece("one ", list(b"one "))
    assert stream.push(list(b"N"), False) == Piece("", [])
    assert not stream.stopped
    assert stream.push(list(b"D two"), False) == Piece("", [])
    assert stream.stopped


def test_text_held_back_is_released_when_it_was_no_stop_string(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["END"])
    assert stream.push(list(b"EN"), False) == Piece("", [])
    assert stream.push(list(b"ENx"), False) == Piece("ENENx", list(b"ENENx"))
    assert stream.push(list(b"E"), False) == Piece("", [])
    assert stream.push([], True) == Piece("E", list(b"E"))
    assert not stream.stopped


def test_a_match_that_began_earlier_wins(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["bcd", "c"])
    assert stream.push(list(b"abc"), False) == Piece("a", list(b"a"))
    assert not stream.stopped
    assert stream.push(list(b"d"), False) == Piece("", [])
    assert stream.stopped


def test_a_later_match_counts_once_the_earlier_one_fails(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ["bcd", "c"])
    assert stream.push(list(b"abc"), False) == Piece("a", list(b"a"))
    assert stream.push(list(b"x"), False) == Piece("b", list(b"b"))
    assert stream.stopped


def test_stop_string_of_several_bytes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a。。b")
    assert run(TextStream(tokenizer, ["。b"]), split(ids, [2, 3, 5])).text == "a。"


def test_match_inside_a_token_keeps_the_token(merged: Tokenizer) -> None:
    ids = [token for text in ("x", "aba", "b") for token in merged.encode(text)]
    assert [merged.decode([token]) for token in ids] == ["x", "aba", "b"]
    for cuts in ([], [1], [1, 2]):
        assert run(TextStream(merged, ["bab"]), split(ids, cuts)) == Piece("xa", ids[:2])


def test_match_that_starts_where_held_text_was_cut_inside_a_token(merged: Tokenizer) -> None:
    [aba], [b] = merged.encode("aba"), merged.encode("b")
    stream = TextStream(merged, ["bab"])
    assert stream.push([aba], False) == Piece("a", [])
    assert stream.push([b], False) == Piece("", [aba])
    assert stream.stopped


@given(ids=st.lists(BYTE_IDS), cuts=st.lists(st.integers(0, 30)))
def test_pieces_join_to_the_decoded_text(
    llada: Tokenizer, dream: Tokenizer, ids: list[int], cuts: list[int]
) -> None:
    for tokenizer in (llada, dream):
        whole = Piece(tokenizer.decode(ids), ids)
        assert run(TextStream(tokenizer, []), split(ids, cuts)) == whole


STOPS = st.lists(st.text("ab é你\ufffd", min_size=1, max_size=4), min_size=1, max_size=3)
MERGED_IDS = st.one_of(BYTE_IDS, st.integers(262, 267))


@given(ids=st.lists(MERGED_IDS), cuts=st.lists(st.integers(0, 30)), stop=STOPS)
def test_stops_do_not_depend_on_the_pushes(
    merged: Tokenizer, ids: list[int], cuts: list[int], stop: list[str]
) -> None:
    stream = TextStream(merged, stop)
    assert run(stream, split(ids, cuts)) == expected(merged, ids, stop)
    assert stream.stopped == any(s in merged.decode(ids) for s in stop)


@given(ids=st.lists(MERGED_IDS), stop=STOPS)
def test_running_ids_cover_the_running_text(
    merged: Tokenizer, ids: list[int], stop: list[str]
) -> None:
    stream = TextStream(merged, stop)
    ends = stable_ends(merged, ids)
    text, released = "", 0
    for pushed, token in enumerate(ids, start=1):
        piece = stream.push([token], False)
        text, released = text + piece.text, released + len(piece.ids)
        if stream.stopped:
            break
        assert released == sum(end <= len(text) for end in ends[:pushed])
