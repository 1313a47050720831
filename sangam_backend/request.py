"""The vocabulary of the engine.

canvas    the generated region: mask tokens that turn into the answer, a whole number of blocks
block     consecutive positions of the canvas that are unmasked together
prefill   a forward over the whole sequence (prompt and canvas), at the start of each block
decode    a forward over the current block against the cached K/V of the whole sequence
commit    to replace a mask by a token for good
prefix    the committed tokens from the left end of the canvas up to its first mask
page      16 positions of the KV pool;  slot: the row of an admitted request in device tables
handover  of a block from the instance that prefilled it to one that decodes it
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from sangam_backend import rules
from sangam_backend.config import Family
from sangam_backend.rules import Commit, Confidence, Count, Unmasking

if TYPE_CHECKING:
    from sangam_backend.text import TextStream


MAX_FORWARDS_PER_BLOCK = 1 << 16


class ErrorCode(enum.Enum):
    """Triton's error codes, as far as the engine uses them."""

    INVALID_ARG = "INVALID_ARG"
    UNAVAILABLE = "UNAVAILABLE"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"


class RequestError(Exception):
    """A refusal of one request. The message names the field, its value and the limit."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[type[RequestError], tuple[ErrorCode, str]]:
        return RequestError, (self.code, str(self))


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is generated; `parameters.parse_sampling` fills and checks it."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    """0 is off."""
    seed: int
    unmasking: Unmasking
    confidence_threshold: float
    factor: float
    tokens_per_step: int
    steps: int
    """Forwards over all blocks under the `steps` rule."""
    confidence: Confidence
    stop: tuple[str, ...]
    ignore_eos: bool
    block_length: int

    @property
    def num_blocks(self) -> int:
        return -(-self.max_tokens // self.block_length)

    @property
    def canvas_length(self) -> int:
        return self.num_blocks * self.block_length

    def commit(self, family: Family, block: int, forward: int, full_logits: bool) -> Commit:
        """What a forward commits.

        Args:
            block: Index of the block.
            forward: Counts the forwards of the block from 0, its prefill.
            full_logits: Whether each position of the block is predicted in every forward. With a
                cache, Dream's prefill predicts the first position alone.
        """
        if family == "dream" and forward == 0 and not full_logits:
            return Commit(Count.FIRST, 0.0)
        if self.unmasking is Unmasking.STEPS:
            steps = rules.steps_of_block(self.steps, self.num_blocks, block)
            if family == "dream":
                return Commit(Count.SHARE, rules.dream_share(steps, forward))
            return Commit(Count.QUOTA, rules.llada_quota(self.block_length, steps, forward))
        return {
            Unmasking.THRESHOLD: Commit(Count.THRESHOLD, self.confidence_threshold),
            Unmasking.FACTOR: Commit(Count.FACTOR, self.factor),
            Unmasking.QUOTA: Commit(Count.QUOTA, self.tokens_per_step),
            Unmasking.RANDOM: Commit(Count.RANDOM, 0.0),
        }[self.unmasking]


class Output(NamedTuple):
    """What a request has to tell its client after an iteration."""

    text: str
    ids: list[int]
    finish_reason: FinishReason | None
    error: RequestError | None = None
    done: bool = False
    """Nothing more comes from this engine: the request has ended, or its block where the engine
    was given only that."""
    num_forwards: int = 0
    """Of the request so far."""


class Prefilled(NamedTuple):
    """What a prefill leaves to the instance that decodes the block."""

    tokens: list[int]
    """Of the block, with masks where nothing is committed."""
    location: dict[str, Any] | None
    """Where the K/V can be pulled from; None when no mask is left, so that nothing needs it."""


@dataclass(eq=False, slots=True)
class Request:
    """A request and its progress. The engine thread owns it after submission."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    stop_token_ids: frozenset[int]
    mask_token_id: int
    text: TextStream | None
    """None for a checkpoint without a tokenizer."""
    stream: bool
    arrival: float = field(default_factory=time.monotonic)
    trace_id: str = ""
    """Of the client's trace, see `trace_context`."""

    slot: int = -1
    pages: list[int] = field(default_factory=list)
    last_block: int = -1
    """Where this engine is done with the request; by default the last of the canvas."""
    prefilled: Prefilled | None = None
    """The current block's prefill, where another instance has run it."""

    began: float | None = None
    """When its first forward in this engine was launched, on the clock of `arrival`."""
    num_prefills: int = 0
    """Launched by this engine."""

    # As planned: with iterations under way, ahead of what is known of their results.
    block: int = 0
    forward_in_block: int = 0
    masks: int | None = 0
    """Masks of the block after the forwards planned; None where only the device knows."""

    # As known from results.
    num_forwards: int = 0
    """Forwards that could commit something."""
    finished_blocks: int = 0
    canvas: list[int] = field(default_factory=list)
    prefix: int = 0
    """Committed tokens from the left, before a stop token and within max_tokens."""
    finish_reason: FinishReason | None = None
    num_output_tokens: int = 0
    _pushed: int = 0
    _held_text: str = ""
    _held_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.canvas = [self.mask_token_id] * self.params.canvas_length
        self.masks = self.params.block_length
        if self.last_block < 0:
            self.last_block = self.params.num_blocks - 1

    @property
    def sequence_length(self) -> int:
        return len(self.prompt) + self.params.canvas_length

    @property
    def block_start(self) -> int:
        """Position of the current block in the sequence."""
        return len(self.prompt) + self.block * self.params.block_length

    @property
    def forward(self) -> int:
        """Numbers the next forward for its random draws, whatever ran in vain before it."""
        return self.block * MAX_FORWARDS_PER_BLOCK + self.forward_in_block

    @property
    def remaining_blocks(self) -> int:
        return self.params.num_blocks - self.block

    def plan_forward(self, commit: Commit) -> bool:
        """Counts a forward of the block as planned.

        Returns:
            Whether it is sure to finish the block.
        """
        self.forward_in_block += 1
        committed = None if self.masks is None else commit.foresee(self.masks)
        self.masks = None if self.masks is None or committed is None else self.masks - committed
        return self.masks == 0

    def plan_next_block(self) -> None:
        self.block += 1
        self.forward_in_block = 0
        self.masks = self.params.block_length

    def resume(self, canvas: Sequence[int], num_forwards: int) -> None:
        """Takes over a request for its next block alone, the ones before it committed elsewhere.

        Args:
            canvas: The tokens of the blocks before; whoever committed them has told the client.
            num_forwards: What they took.
        """
        self.num_forwards = num_forwards
        self.canvas[: len(canvas)] = canvas
        self.block = self.last_block = self.finished_blocks = (
            len(canvas) // self.params.block_length
        )
        self._grow_prefix()
        self._take_output()

    def take_prefilled(self) -> Output | None:
        """Takes the tokens that the other instance's prefill has committed."""
        assert self.prefilled is not None
        tokens, self.prefilled = self.prefilled.tokens, None
        self.forward_in_block = 1
        self.masks = tokens.count(self.mask_token_id)
        return self.advance(self.block, tokens)

    def advance(self, block: int, tokens: Sequence[int]) -> Output | None:
        """Takes a block's tokens after a forward.

        Returns:
            What can be told to the client now, if anything.
        """
        start = block * self.params.block_length
        self.canvas[start : start + self.params.block_length] = tokens
        self.num_forwards += 1
        if self.mask_token_id not in tokens:
            self.finished_blocks = block + 1
        self._grow_prefix()
        return self._take_output()

    def _grow_prefix(self) -> None:
        while self.finish_reason is None:
            if self.prefix == self.params.max_tokens:
                self.finish_reason = FinishReason.LENGTH
            elif (token := self.canvas[self.prefix]) == self.mask_token_id:
                return
            elif token in self.stop_token_ids and not self.params.ignore_eos:
                self.finish_reason = FinishReason.STOP
            else:
                self.prefix += 1

    def _take_output(self) -> Output | None:
        last = self.finish_reason is not None
        if not (last or self.stream or self.params.stop):
            return None
        fresh = self.canvas[self._pushed : self.prefix]
        self._pushed = self.prefix
        text, ids = ("", fresh) if self.text is None else self.text.push(fresh, last)
        if self.text is not None and self.text.stopped:
            self.finish_reason = FinishReason.STOP
        self.num_output_tokens += len(ids)
        self._held_text += text
        self._held_ids += ids
        if self.finish_reason is None and not (self.stream and self._held_ids):
            return None
        output = Output(
            self._held_text,
            self._held_ids,
            self.finish_reason,
            num_forwards=self.num_forwards,
        )
        self._held_text, self._held_ids = "", []
        return output
