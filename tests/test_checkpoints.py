"""The code that makes the small checkpoints: tasks, tokenizers, data, and exported weights."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest
import tasks
import torch
import train
from exact_match import decode, make_questions
from make_tiny import CONTEXT, EMBEDDING_ROWS, FAMILIES, TEXT_TOKENS, vocabulary, write
from tiny_model import Model, save_weights, sequences_of
from training_data import BLOCK, CANVAS_BLOCKS, SHARES, encoder, make_chunk

from sangam_backend.config import EngineConfig
from sangam_backend.frontend import open_frontend
from sangam_backend.models import load_model
from sangam_backend.prompt import Prompt
from sangam_backend.reference import Predictor, ServingSampler, generate
from sangam_backend.text import Tokenizer

ROOT = Path(__file__).parent.parent
ROW = 4096
CPU = torch.device("cpu")
MOST_PARAMETERS = 4_000_000
TEXTS = (
    "Ray has 59 cards and gives away 57. How many cards now?",
    "Add 4363 and 75.\n\n  naïve 你好 😀\t\u200b end ",
    "don't  stop,\r\n(now)  ",
)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Model]:
    """A random model with attention sharp enough to show a wrong rotation or head."""
    directory = tmp_path_factory.mktemp(family)
    torch.manual_seed(0)
    model = Model(FAMILIES[family])
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            scale = parameter.shape[-1] ** -0.5 * 1.5 if parameter.dim() > 1 else 0.2
            parameter.add_(noise * scale).copy_(parameter.bfloat16())
    write(family, directory)
    save_weights(model, family, directory)
    return directory, model


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    loaded = {}
    for family in FAMILIES:
        directory = tmp_path_factory.mktemp(family)
        write(family, directory)
        tokenizer = Tokenizer.load(directory, family)
        assert tokenizer is not None
        loaded[family] = tokenizer
    return loaded


@pytest.mark.parametrize("task", tasks.TASKS)
def test_answers_are_right_and_others_wrong(task: str) -> None:
    rng = Random(0)
    for _ in range(50):
        item = tasks.generate(rng, task)
        assert item.task == task
        assert item.is_correct(item.answer)
        assert not any(map(item.is_correct, ["", item.answer[:-1], item.answer + " 1"]))


def test_any_random_choice_that_keeps_the_rule_is_right() -> None:
    shuffled = tasks.Item("shuffle", "Shuffle the letters a b c.", "c a b")
    assert shuffled.is_correct("b c a")
    assert not any(map(shuffled.is_correct, ["b b a", "b c", "b c a d"]))
    chosen = tasks.Item("choose", "Choose 2 words and write them twice: red, cats, Rome.", "")
    assert chosen.is_correct("Once: Rome, red. Twice: Rome, red.")
    wrong = ("Rome, red.|red, Rome.", "red, red.|red, red.", "red.|red.", "red, tea.|red, tea.")
    for first, second in (pair.split("|") for pair in wrong):
        assert not chosen.is_correct(f"Once: {first} Twice: {second}")


@pytest.mark.parametrize("task", tasks.TASKS)
def test_held_out_items_are_fixed_and_never_trained_on(task: str) -> None:
    held_out = tasks.held_out_items(task, 100)
    assert held_out == tasks.held_out_items(task)[:100]
    assert len({item.prompt for item in held_out}) == 100
    assert all(tasks.is_held_out(item.prompt) for item in held_out)
    rng, again = Random(1), Random(1)
    trained = [tasks.generate(rng, task) for _ in range(100)]
    assert trained == [tasks.generate(again, task) for _ in range(100)]
    assert not any(tasks.is_held_out(item.prompt) for item in trained)


def test_lengths_fit_the_context(family: str) -> None:
    encode = encoder(family)
    for task in tasks.TASKS:
        items = tasks.held_out_items(task, 100)
        assert max(map(len, encode.answers(items))) <= CANVAS_BLOCKS * BLOCK
        assert max(map(len, encode.prompts(items))) + CANVAS_BLOCKS * BLOCK <= CONTEXT
    longest = max(map(len, encode.prompts(tasks.held_out_items("long_facts", 100))))
    assert longest > 1400


def test_texts_have_the_same_ids_in_both_families(tokenizers: dict[str, Tokenizer]) -> None:
    items = [item for task in tasks.TASKS for item in tasks.held_out_items(task, 20)]
    for text in (*TEXTS, *(item.prompt for item in items), *(item.answer for item in items)):
        ids = tokenizers["llada"].encode(text)
        assert tokenizers["dream"].encode(text) == ids
        assert all(tokenizer.decode(ids) == text for tokenizer in tokenizers.values())


def test_tokens(tokenizers: dict[str, Tokenizer]) -> None:
    ids, merges = vocabulary()
    assert len(ids) == TEXT_TOKENS == 256 + len(merges)
    assert not any(len(token) > 1 and set(token) & set("0123456789") for token in ids)
    for tokenizer in tokenizers.values():
        assert tokenizer.vocab_size <= EMBEDDING_ROWS
        assert tokenizer.encode("4096") == list(b"4096")
        known = [*tasks.NAMES, *tasks.VALUES, *tasks.SENTENCE_WORDS, *tasks.RELATIONS]
        assert all(len(tokenizer.encode(f" {word}")) == 1 for word in known)


def test_training_prompts_are_the_chats_of_serving(
    family: str, tokenizers: dict[str, Tokenizer]
) -> None:
    items = [tasks.held_out_items(task, 1)[0] for task in tasks.TASKS]
    chats = [[{"role": "user", "content": item.prompt}] for item in items]
    served = [tokenizers[family].encode_chat(chat) for chat in chats]
    assert encoder(family).prompts(items) == served
    assert tokenizers[family].stop_ids == {FAMILIES[family].eos_id, FAMILIES[family].turn_end_id}


def test_rows(family: str) -> None:
    rows = make_chunk(family, 300, ROW, CONTEXT, SHARES, "0")
    shape = FAMILIES[family]
    for tokens, offsets, starts, ends in zip(*rows):
        assert (np.diff(offsets) >= 0).all()
        chats = int((offsets < ROW).sum())
        for place in range(chats):
            chat = tokens[offsets[place] : offsets[place + 1]]
            start, end = starts[place], ends[place]
            if start == ROW:  # the rest of the row
                assert place == chats - 1
                assert len(chat) <= CONTEXT
                continue
            assert 0 < start < end <= len(chat)
            assert (len(chat) - start) % BLOCK == 0
            assert chat[end - 1] == shape.turn_end_id
            assert set(chat[end:].tolist()) <= {shape.eos_id}
    # Only the last row's chats are left out.
    assert 300 - ROW // BLOCK < (rows.starts < ROW).sum() <= 300
    again = make_chunk(family, 300, ROW, CONTEXT, SHARES, "0")
    easy = make_chunk(family, 300, ROW, 100, SHARES, "0")
    assert 50 < np.diff(easy.offsets)[easy.starts < ROW].max() <= 100
    for column in rows._fields:
        assert np.array_equal(getattr(rows, column), getattr(again, column))


def test_corruption_masks_only_answers(family: str) -> None:
    shape = FAMILIES[family]
    for columns in zip(*make_chunk(family, 300, ROW, CONTEXT, SHARES, "0")):
        row = train.Row(*map(torch.as_tensor, columns))
        ids, weight = train.corrupt(row, shape)
        masked = ids == shape.mask_id
        assert torch.equal(ids[~masked], row.tokens.long()[~masked])
        assert torch.equal(masked, weight > 0)
        answers = torch.zeros(ROW, dtype=torch.bool)
        for offset, following, start in zip(row.offsets, row.offsets[1:], row.starts):
            answers[offset + start : following] = True
        assert not (masked & ~answers).any()
        assert 0.3 < masked.sum() / answers.sum() < 0.95


def test_size(family: str) -> None:
    assert sum(p.numel() for p in Model(FAMILIES[family]).parameters()) <= MOST_PARAMETERS


def test_exported_weights_serve_the_trained_logits(checkpoint: tuple[Path, Model]) -> None:
    directory, model = checkpoint
    served = load_model(EngineConfig(model=str(directory)), torch.float32, CPU)
    ids = torch.randint(EMBEDDING_ROWS, (300,), generator=torch.Generator().manual_seed(0))
    logits = served.logits(served.forward(ids, Predictor(served, len(ids)).attention))
    with torch.no_grad():
        expected = model(ids, sequences_of([len(ids)], CPU))
    assert expected.std() > 0.5
    assert torch.allclose(logits, expected, atol=5e-4)


def test_the_exact_loop_is_the_reference_of_serving(
    checkpoint: tuple[Path, Model], family: str
) -> None:
    directory, model = checkpoint
    commits = 4
    items = [tasks.held_out_items(task, 1)[0] for task in ("add", "story", "choose")]
    questions = make_questions(encoder(family), items)
    answers = decode(model, FAMILIES[family], questions, commits)
    config = EngineConfig(model=str(directory), load_format="safetensors")
    served = load_model(config, torch.float32, CPU)
    frontend = open_frontend(served, config, pool_tokens=1 << 20)
    for question, answer in zip(questions, answers):
        sampling = {"unmasking": "quota", "tokens_per_step": commits, "ignore_eos": True}
        sampling |= {"max_tokens": question.canvas, "block_length": BLOCK}
        request = frontend.new_request("", Prompt(input_ids=question.prompt), sampling, False)
        sampler = ServingSampler(request, served.config, cached=False)
        predictor = Predictor(served, request.sequence_length)
        (output,) = generate(request, predictor, sampler, "none")
        assert output.ids == answer


def test_files_are_the_released_layout(checkpoint: tuple[Path, Model], family: str) -> None:
    directory, _ = checkpoint
    shards = sorted(path.name for path in directory.glob("*.safetensors"))
    if family == "llada":
        assert shards == ["model.safetensors"]
        return
    places = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    assert sorted(set(places.values())) == shards
    assert len(shards) == 2
    assert min(Counter(places.values()).values()) > 1


def test_training_runs_end_to_end(family: str, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    options = f"--family {family} --device cpu --steps 3 --items 300 --tokens-per-step 2048"
    command = [sys.executable, "checkpoints/train.py", *options.split(), "--eval-items", "0"]
    subprocess.run([*command, "--out", out, "--log", log], cwd=ROOT, check=True, timeout=200)
    assert "3 steps" in log.read_text()
    load_model(EngineConfig(model=str(out)), torch.float32, CPU)


def test_sequences_do_not_see_each_other(family: str) -> None:
    model = Model(FAMILIES[family])
    lengths = [5, 40, 17]
    ids = torch.randint(EMBEDDING_ROWS, (sum(lengths),))
    with torch.no_grad():
        together = model(ids, sequences_of(lengths, CPU))
        alone = [model(part, sequences_of([len(part)], CPU)) for part in ids.split(lengths)]
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)
