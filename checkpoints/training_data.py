"""Chats of generated tasks, packed into rows of one size."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from functools import cache, partial
from random import Random
from typing import NamedTuple

import numpy as np
from make_tiny import CONTEXT, FAMILIES, Family, build_tokenizer, vocabulary
from numpy.typing import NDArray
from tasks import TASKS, Item, generate
from tokenizers import Tokenizer

BLOCK = 32
CANVAS_BLOCKS = 8
CHUNK = 10_000
WORKERS = 16

# Rows of each task for one of the others. Retrieval is learned last and needs the most.
SHARES = {
    "count": 2.0,
    "facts": 3.0,
    "long_facts": 0.3,
    "long_repeat": 0.4,
    "multiply": 2.0,
    "totals": 2.0,
    "long_sort": 2.0,
    "shuffle": 2.0,
    "choose": 2.5,
}
EASY_SHARES = SHARES | {"facts": 12.0}
"""For the short chats of the beginning, where retrieval is found out."""

# What comes around the user's text in a chat of one turn.
AROUND = {
    "llada": (
        "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\n",
        "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "dream": (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n",
        "<|im_end|>\n<|im_start|>assistant\n",
    ),
}


class Rows(NamedTuple):
    """Rows [count, size] of whole chats one after the other, and up to size // BLOCK chats of each.

    A chat is the prompt, the answer, the end of turn, and end-of-text to the end of its canvas.
    """

    tokens: NDArray[np.int16]
    offsets: NDArray[np.int32]
    """Where each chat begins, then where the last one ends: the row's size, repeated."""
    starts: NDArray[np.int16]
    """The answer's first token, counted from the chat's."""
    ends: NDArray[np.int16]
    """One past the end of turn."""


class Encoder:
    """Encodes prompts as a family's chat, and answers."""

    def __init__(self, family: str) -> None:
        self.family: Family = FAMILIES[family]
        self.tokenizer: Tokenizer = build_tokenizer(self.family)
        self._before, self._after = (self.tokenizer.encode(text).ids for text in AROUND[family])

    def prompts(self, items: list[Item]) -> list[list[int]]:
        encodings = self.tokenizer.encode_batch([item.prompt for item in items])
        return [self._before + encoding.ids + self._after for encoding in encodings]

    def answers(self, items: list[Item]) -> list[list[int]]:
        encodings = self.tokenizer.encode_batch([item.answer for item in items])
        return [[*encoding.ids, self.family.turn_end_id] for encoding in encodings]

    def text(self, answer: list[int]) -> str:
        stops = (self.family.turn_end_id, self.family.eos_id)
        end = next((index for index, token in enumerate(answer) if token in stops), None)
        return str(self.tokenizer.decode(answer[:end]))


encoder = cache(Encoder)


def make_rows(
    family: str,
    seed: str,
    count: int,
    size: int,
    longest: int = CONTEXT,
    shares: dict[str, float] = SHARES,
) -> Rows:
    """About `count` chats, without those of more than `longest` tokens, in rows of `size` tokens;
    made on all cores."""
    # A tokenizer that has started threads cannot be used after a fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    vocabulary()
    chunks = max(1, count // CHUNK)
    work = partial(make_chunk, family, min(count, CHUNK), size, longest, shares)
    seeds = [f"{seed} {chunk}" for chunk in range(chunks)]
    workers = min(WORKERS, len(os.sched_getaffinity(0)))
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        made = pool.map(work, seeds, chunksize=1)
    return Rows(*(np.concatenate(column) for column in zip(*made)))


def make_chunk(
    family: str, count: int, size: int, longest: int, shares: dict[str, float], seed: str
) -> Rows:
    rng = Random(seed)
    weights = [shares.get(task, 1.0) for task in TASKS]
    items = [generate(rng, task) for task in rng.choices(list(TASKS), weights, k=count)]
    encode = encoder(family)
    answers = encode.answers(items)
    canvases = [canvas_length(rng, len(answer)) for answer in answers]
    prompts = encode.prompts(items)
    lengths = [len(prompt) + canvas for prompt, canvas in zip(prompts, canvases)]
    filled = list(fill_rows(lengths, size, longest))
    most = size // BLOCK
    rows = Rows(
        np.full((len(filled), size), encode.family.eos_id, np.int16),
        np.full((len(filled), most + 1), size, np.int32),
        # What is left at the end of a row is a chat without an answer.
        np.full((len(filled), most), size, np.int16),
        np.full((len(filled), most), size, np.int16),
    )
    for chats, tokens, offsets, starts, ends in zip(filled, *rows):
        offset = 0
        for place, chat in enumerate(chats):
            text = prompts[chat] + answers[chat]
            tokens[offset : offset + len(text)] = text
            starts[place], ends[place] = len(prompts[chat]), len(text)
            offsets[place] = offset
            offset += lengths[chat]
        offsets[len(chats)] = offset
    return rows


def canvas_length(rng: Random, answer: int) -> int:
    """Blocks that hold the answer, often with some to spare, which end-of-text will fill."""
    needed = -(-answer // BLOCK)
    spare = max(0, CANVAS_BLOCKS - needed)
    return (needed + (rng.randint(0, spare) if rng.random() < 0.4 else 0)) * BLOCK


def fill_rows(lengths: list[int], size: int, longest: int) -> Iterator[list[int]]:
    """Chats in order, as many to a row as fit; those left for an unfilled last row are dropped."""
    row: list[int] = []
    room = size
    for chat, length in enumerate(lengths):
        if length > longest:
            continue
        if length > room:
            yield row
            row, room = [], size
        row.append(chat)
        room -= length
