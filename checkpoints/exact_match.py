"""Exact match by the slow exact loop: no cache, a fixed number of tokens a forward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from make_tiny import Family
from tasks import Item
from tiny_model import Model
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
    ids = torch.full((len(questions), max(q.length for q in questions)), family.eos_id)
    for row, question in zip(ids, questions):
        row[: len(question.prompt)] = torch.tensor(question.prompt)
        row[len(question.prompt) : question.length] = family.mask_id
    ids = ids.to(device)
    starts = torch.tensor([len(q.prompt) for q in questions], device=device)[:, None]
    ends = torch.tensor([q.length for q in questions], device=device)[:, None]
    position = torch.arange(ids.shape[1], device=device)
    keys = (position < ends)[:, None, None]
    stops = torch.tensor([family.eos_id, family.turn_end_id], device=device)
    for first in range(0, max(q.canvas for q in questions), BLOCK):
        block = starts + torch.arange(first, first + BLOCK, device=device)
        block = block.clamp(max=ids.shape[1] - 1)
        for _ in range(BLOCK // commits):
            commit(model, family, ids, keys, block, commits)
        passed = (position >= starts) & (position < starts + first + BLOCK)
        if (torch.isin(ids, stops) & passed).any(1).all():
            break
    return [row[len(q.prompt) : q.length] for row, q in zip(ids.tolist(), questions)]


def commit(
    model: Model, family: Family, ids: Tensor, keys: Tensor, block: Tensor, count: int
) -> None:
    """Writes the `count` surest tokens among the masked positions `block` of each row."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.device.type == "cuda"):
        hidden = model.hidden(ids, keys)
        rows = torch.arange(len(ids), device=ids.device)[:, None]
        logits = model.head(hidden[rows, block - family.logit_shift]).float()
    logits[..., family.mask_id] = -torch.inf
    confidence, tokens = logits.softmax(-1).max(-1)
    shown = ids.gather(1, block)
    masked = shown == family.mask_id
    surest = confidence.where(masked, -1.0).topk(count).indices
    chosen = torch.zeros_like(masked).scatter(1, surest, True) & masked
    ids.scatter_(1, block, tokens.where(chosen, shown))
