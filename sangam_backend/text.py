"""Text to token ids and back: the checkpoint's tokenizer, and answers as they grow."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from sangam_backend.config import ConfigError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt")


class _Format(NamedTuple):
    loader: type[PreTrainedTokenizerFast]
    required: tuple[str, ...]
    turn_end: str


# Dream names a remote-code class, whose vocabulary, merges and rules are Qwen2's.
_FORMATS = {
    "llada": _Format(PreTrainedTokenizerFast, ("tokenizer.json",), "<|eot_id|>"),
    "dream": _Format(Qwen2Tokenizer, ("vocab.json", "merges.txt"), "<|im_end|>"),
}


class Tokenizer:
    """The checkpoint's tokenizer and chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, turn_end: str) -> None:
        self._chat = tokenizer
        # The core is called directly: it keeps no state between calls, so threads may share it,
        # and it neither truncates nor tidies spaces.
        self._core = tokenizer.backend_tokenizer
        self._core.no_truncation()
        self._core.no_padding()
        self.vocab_size = len(tokenizer)
        self.stop_ids = self._stop_ids(turn_end)
        self._check_declared_ids()

    @classmethod
    def load(cls, directory: Path, family: str) -> Tokenizer | None:
        """None when the directory holds no tokenizer files."""
        if not any((directory / name).exists() for name in TOKENIZER_FILES):
            return None
        loader, required, turn_end = _FORMATS[family]
        missing = [name for name in required if not (directory / name).exists()]
        if missing:
            raise ConfigError(f"tokenizer in {directory}: no {' and no '.join(missing)}")
        try:
            return cls(loader.from_pretrained(directory, local_files_only=True), turn_end)
        except Exception as error:  # the core raises bare Exception for a malformed file
            raise ConfigError(f"tokenizer in {directory} cannot be loaded: {error}") from error

    def _stop_ids(self, turn_end: str) -> frozenset[int]:
        candidates = (self._chat.eos_token_id, self._core.token_to_id(turn_end))
        return frozenset(token for token in candidates if token is not None)

    def _check_declared_ids(self) -> None:
        for token, content in self._chat.init_kwargs.get("added_tokens_decoder", {}).items():
            loaded = self._core.token_to_id(str(content))
            if loaded != token:
                raise ValueError(f"{content} is declared as {token} but loads as {loaded}")

    def encode(self, text: str) -> list[int]:
        try:
            return self._core.encode(text, add_special_tokens=False).ids
        except TypeError as error:  # what the core makes of text that UTF-8 cannot hold
            raise ValueError("the text holds half of a surrogate pair") from error

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        if self._chat.chat_template is None:
            raise ValueError("the checkpoint has no chat template")
        try:
            text = self._chat.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refused the messages: {error}") from error
        assert isinstance(text, str)
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._core.decode(ids, skip_special_tokens=True)


class Piece(NamedTuple):
    text: str
    ids: list[int]


class TextStream:
    """Turns a growing run of committed tokens into text that can no longer change.

    Text never ends inside a character, and with stop strings it ends before the earliest match.
    The pieces joined are the same however the tokens were split over the pushes.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self.stopped = False
        self._characters = _Characters(tokenizer)
        self._stop = tuple(stop)
        self._held = _Held()

    def push(self, ids: Sequence[int], last: bool) -> Piece:
        """`last` releases whatever is still held back."""
        if self.stopped:
            return Piece("", [])
        if not self._stop:
            text = self._characters.push(ids) + (self._characters.flush() if last else "")
            return Piece(text, list(ids))
        for token in ids:
            self._held.add(token, self._characters.push([token]))
        if last:
            self._held.text += self._characters.flush()
        return self._release(last)

    def _release(self, last: bool) -> Piece:
        text = self._held.text
        safe = len(text) if last else min(_open_match(text, stop) for stop in self._stop)
        match = min((text.find(stop) for stop in self._stop if stop in text), default=None)
        # A match that began earlier and is still open would win: wait for it.
        if match is not None and match <= safe:
            self.stopped = True
            return self._held.cut(match)
        return self._held.take_all() if last else self._held.take(safe)


class _Held:
    """Text and tokens not yet released; `ends` counts characters from the start of `text`."""

    def __init__(self) -> None:
        self.text = ""
        self._ids: list[int] = []
        self._ends: list[int] = []
        self._released_end = 0

    def add(self, token: int, text: str) -> None:
        self.text += text
        self._ids.append(token)
        self._ends.append(len(self.text))

    def take(self, length: int) -> Piece:
        return self._split(length, bisect_right(self._ends, length))

    def take_all(self) -> Piece:
        return self._split(len(self.text), len(self._ids))

    def cut(self, length: int) -> Piece:
        """As `take`, with the token that the cut falls into."""
        tokens = bisect_right(self._ends, length)
        end = self._ends[tokens - 1] if tokens else self._released_end
        return self._split(length, tokens + (end < length))

    def _split(self, length: int, tokens: int) -> Piece:
        piece = Piece(self.text[:length], self._ids[:tokens])
        end = self._ends[tokens - 1] if tokens else self._released_end
        self._released_end = end - length
        self.text = self.text[length:]
        self._ids = self._ids[tokens:]
        self._ends = [end - length for end in self._ends[tokens:]]
        return piece


class _Characters:
    """Decodes tokens as they come, holding back those that end inside a UTF-8 character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._tail: list[int] = []
        self._tail_text = ""  # ends with the one replacement character that is held back

    def push(self, ids: Sequence[int]) -> str:
        alone = self._decode(ids)
        if not alone:
            return ""
        tail = [*self._tail, *ids]
        text = self._decode(tail) if self._tail else alone
        fresh = text[max(len(self._tail_text) - 1, 0) :]
        if not text.endswith(REPLACEMENT):
            self._tail, self._tail_text = [], ""
            return fresh
        # Equal means that the old tail was invalid, not unfinished: it is dropped, or a run of
        # invalid bytes would be decoded again and again.
        settled = text == self._tail_text + alone
        self._tail, self._tail_text = (list(ids), alone) if settled else (tail, text)
        return fresh[:-1]

    def flush(self) -> str:
        rest = self._tail_text[-1:]
        self._tail, self._tail_text = [], ""
        return rest


def _open_match(text: str, stop: str) -> int:
    """Where an unfinished `stop` at the end of `text` begins; the end when there is none."""
    longest = min(len(stop) - 1, len(text))
    overlaps = (size for size in range(longest, 0, -1) if text.endswith(stop[:size]))
    return len(text) - next(overlaps, 0)
