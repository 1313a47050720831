"""Chats of generated tasks as rows of tokens, grouped by length."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from functools import cache, partial
from random import Random
from typing import NamedTuple

import numpy as np
from make_tiny import FAMILIES, Family, build_tokenizer, vocabulary
from numpy.typing import NDArray
from tasks import TASKS, Item, generate
from tokenizers import Tokenizer

BLOCK = 32
CANVAS_BLOCKS = 8
FINE_LENGTH, FINE, COARSE = 512, 4, 32
"""Rows are a multiple of FINE tokens up to FINE_LENGTH, of COARSE beyond."""
CHUNK = 10_000
WORKERS = 16

# Rows of each task for one of the others. Retrieval is learned last and needs the most.
SHARES = {
    "facts": 3.0,
    "long_facts": 0.3,
    "long_repeat": 0.4,
    "multiply": 2.0,
    "totals": 2.0,
    "long_sort": 2.0,
    "shuffle": 2.0,
    "choose": 2.5,
}

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
    """Chats of one length: the prompt, the answer, the end of turn, and end-of-text to the end."""

    tokens: NDArray[np.int16]
    starts: NDArray[np.int16]
    """Where the answer begins."""
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


def make_rows(family: str, seed: int, count: int) -> dict[int, Rows]:
    """About `count` training rows by their length, longest last; made on all cores."""
    # A tokenizer that has started threads cannot be used after a fork.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    vocabulary()
    chunks = max(1, count // CHUNK)
    work = partial(make_chunk, family, min(count, CHUNK))
    seeds = [f"{seed} {chunk}" for chunk in range(chunks)]
    workers = min(WORKERS, len(os.sched_getaffinity(0)))
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        return merge(pool.map(work, seeds, chunksize=1))


def make_chunk(family: str, count: int, seed: str) -> dict[int, Rows]:
    rng = Random(seed)
    shares = [SHARES.get(task, 1.0) for task in TASKS]
    items = [generate(rng, task) for task in rng.choices(list(TASKS), shares, k=count)]
    encode = encoder(family)
    groups: dict[int, list[tuple[list[int], list[int]]]] = {}
    for prompt, answer in zip(encode.prompts(items), encode.answers(items)):
        groups.setdefault(row_length(rng, len(prompt), len(answer)), []).append((prompt, answer))
    return {length: pack(group, length, encode.family.eos_id) for length, group in groups.items()}


def row_length(rng: Random, prompt: int, answer: int) -> int:
    """A length that holds both, often with blocks to spare, which end-of-text will fill."""
    needed = -(-answer // BLOCK)
    spare = max(0, CANVAS_BLOCKS - needed)
    blocks = needed + (rng.randint(0, spare) if rng.random() < 0.4 else 0)
    length = prompt + blocks * BLOCK
    unit = FINE if length <= FINE_LENGTH else COARSE
    return -(-length // unit) * unit


def pack(group: list[tuple[list[int], list[int]]], length: int, fill: int) -> Rows:
    tokens = np.full((len(group), length), fill, np.int16)
    starts = np.array([len(prompt) for prompt, _ in group], np.int16)
    ends = starts + np.array([len(answer) for _, answer in group], np.int16)
    for row, (prompt, answer) in zip(tokens, group):
        row[: len(prompt) + len(answer)] = prompt + answer
    return Rows(tokens, starts, ends)


def merge(chunks: list[dict[int, Rows]]) -> dict[int, Rows]:
    lengths = sorted({length for chunk in chunks for length in chunk})
    return {length: concatenate(chunks, length) for length in lengths}


def concatenate(chunks: list[dict[int, Rows]], length: int) -> Rows:
    parts = [chunk[length] for chunk in chunks if length in chunk]
    return Rows(*(np.concatenate(column) for column in zip(*parts)))


def count_tokens(rows: Mapping[int, Rows]) -> int:
    return sum(group.tokens.size for group in rows.values())
