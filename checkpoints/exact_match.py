"""Exact match by the slow exact loop: no cache, a fixed number of tokens a forward."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

import torch
from make_tiny import Family
from tasks import Item
from tiny_model import Model, Sequences, sequences_of
from torch import Tensor
from training_data import BLOCK, Encoder

TOKENS_PER_FORWARD = 400_000


class Question(NamedTuple):
    item: Item
    prompt: list[int]
    canvas: int
    """Positions for the answer, a multiple of the block."""

    @property
    def length(self) -> int:
        return len(self.prompt) + self.canvas


def accuracy(model: Model, encoder: Encoder, items: list[Item], commits: int) -> float:
    """The share of right answers when each forward commits the `commits` surest tokens."""
    right = 0
    for batch in batches(make_questions(encoder, items)):
        answers = decode(model, encoder.family, batch, commits)
        right += sum(q.item.is_correct(encoder.text(a)) for q, a in zip(batch, answers))
    return right / max(1, len(items))


def make_questions(encoder: Encoder, items: list[Item]) -> list[Question]:
    """Every fourth canvas has a block more than the answer needs."""
    return [
        Question(item, prompt, (-(-len(answer) // BLOCK) + (index % 4 == 3)) * BLOCK)
        for index, (item, prompt, answer) in enumerate(
            zip(items, encoder.prompts(items), encoder.answers(items))
        )
    ]


def batches(questions: list[Question]) -> Iterator[list[Question]]:
    """Questions of similar length together."""
    questions = sorted(questions, key=lambda question: question.length)
    while questions:
        size = max(1, TOKENS_PER_FORWARD // questions[-1].length)
        yield questions[-size:]
        del questions[-size:]


@torch.inference_mode()
def decode(
    model: Model, family: Family, questions: list[Question], commits: int
) -> list[list[int]]:
    device = model.cos.device
    canvases = [[*q.prompt, *[family.mask_id] * q.canvas] for q in questions]
    ids = torch.tensor(list(chain(*canvases)), device=device)
    sequences = sequences_of([q.length for q in questions], device)
    starts = sequences.offsets[:-1, None] + torch.tensor(
        [[len(q.prompt)] for q in questions], device=device
    )
    last = sequences.offsets[1:, None] - 1
    stops = torch.tensor([family.eos_id, family.turn_end_id], device=device)
    ended = torch.zeros(len(questions), dtype=torch.bool, device=device)
    for first in range(0, max(q.canvas for q in questions), BLOCK):
        block = starts + torch.arange(first, first + BLOCK, device=device)
        block = block.minimum(last)
        for _ in range(BLOCK // commits):
            commit(model, family, ids, sequences, block, commits)
        ended |= torch.isin(ids[block], stops).any(1)
        if ended.all():
            break
    rows = ids.split([q.length for q in questions])
    return [row[len(q.prompt) :].tolist() for row, q in zip(rows, questions)]


def commit(
    model: Model, family: Family, ids: Tensor, sequences: Sequences, block: Tensor, count: int
) -> None:
    """Writes the `count` surest tokens among the masked positions of each row of `block`."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.device.type == "cuda"):
        hidden = model.hidden(ids, sequences)
        logits = model.head(hidden[block - family.logit_shift]).float()
    logits[..., family.mask_id] = -torch.inf
    confidence, tokens = logits.softmax(-1).max(-1)
    shown = ids[block]
    masked = shown == family.mask_id
    surest = confidence.where(masked, -1.0).topk(count).indices
    chosen = torch.zeros_like(masked).scatter(1, surest, True) & masked
    ids[block] = tokens.where(chosen, shown)
