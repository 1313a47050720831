"""Proposing and committing tokens, one position at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sangam_backend.config import ModelConfig
from sangam_backend.noise import Stream, uniform
from sangam_backend.request import Request
from sangam_backend.rules import Confidence, Count


@dataclass(frozen=True, slots=True)
class View:
    """What a sampler sees of one forward."""

    x: Tensor
    """The sequence, [length]."""
    logits: Tensor
    """[window, vocab], shifted."""
    window_start: int
    block_start: int
    block_end: int
    masked: Tensor
    """bool [block]"""
    block: int
    forward_in_block: int
    forward: int
    """Numbers the forward for its random draws."""

    @property
    def block_logits(self) -> Tensor:
        return self.logits[self.block_start - self.window_start :][: len(self.masked)]


class Sampler(Protocol):
    def choose(self, view: View) -> tuple[Tensor, Tensor]:
        """Tokens int64 [block], and which of them to commit, bool [block]."""
        ...


class ServingSampler:
    """The rules that Sangam serves, for one request."""

    def __init__(self, request: Request, config: ModelConfig, cached: bool) -> None:
        self.request = request
        self.config = config
        self.cached = cached

    def choose(self, view: View) -> tuple[Tensor, Tensor]:
        length = len(view.masked)
        tokens = torch.zeros(length, dtype=torch.int64)
        confidence: dict[int, float] = {}
        for i in range(length):
            if view.masked[i]:
                position = view.block_start + i
                tokens[i], confidence[i] = self._propose(
                    view.block_logits[i], position, view.forward
                )
        commit = torch.zeros(length, dtype=torch.bool)
        commit[self._select(confidence, view)] = True
        return tokens.to(view.x.device), commit.to(view.x.device)

    def _propose(self, logits: Tensor, position: int, forward: int) -> tuple[int, float]:
        params, config = self.request.params, self.config
        scores = logits.double().cpu().clone()
        scores[config.mask_token_id] = -math.inf
        if position < len(self.request.prompt) + params.min_tokens:
            scores[list(config.stop_token_ids)] = -math.inf
        filtered = scores / params.temperature if params.temperature > 0 else scores
        filtered = _keep_top_k(_keep_top_p(filtered, params.top_p), params.top_k)
        if params.temperature > 0:
            u = self._draws(Stream.TOKEN, forward, position, lanes=len(scores))
            token = int((filtered - (-u.log()).log()).argmax())
        else:
            token = int(filtered.argmax())
        p = (filtered if config.family == "dream" else scores).softmax(-1)
        if params.confidence is Confidence.MARGIN:
            best, second = p.topk(2).values.tolist()
            return token, best - second
        if params.confidence is Confidence.ENTROPY:
            return token, float((p * (p + 1e-10).log()).sum())
        if params.confidence is Confidence.RANDOM:
            return token, float(self._draws(Stream.CONFIDENCE, forward, position, lanes=1))
        return token, float(p[token])

    def _select(self, confidence: dict[int, float], view: View) -> list[int]:
        """The masked positions of the block to commit."""
        commit = self.request.params.commit(
            self.config.family, view.block, view.forward_in_block, full_logits=not self.cached
        )
        if commit.rule is Count.FIRST:
            return [0]
        if commit.rule is Count.RANDOM:
            for i in confidence:
                position = view.block_start + i
                draw = self._draws(Stream.CONFIDENCE, view.forward, position, lanes=1)
                confidence[i] = float(draw)
        ranked = sorted(confidence, key=lambda i: (-confidence[i], i))
        if commit.rule is Count.THRESHOLD:
            return [i for i in ranked if confidence[i] >= commit.value] or ranked[:1]
        if commit.rule is Count.FACTOR:
            return ranked[: _factor_count([confidence[i] for i in ranked], commit.value)]
        if commit.rule is Count.QUOTA:
            return ranked[: int(commit.value)]
        if commit.rule is Count.SHARE:
            share = torch.tensor(float(len(ranked))) * torch.tensor(commit.value)
            return ranked[: int(share)]
        draw = self._draws(Stream.COUNT, view.forward, 0, lanes=1)
        return ranked[: 1 + int(float(draw) * len(ranked))]

    def _draws(self, stream: Stream, forward: int, position: int, lanes: int) -> Tensor:
        seed, forward_, position_ = (
            torch.tensor([value]) for value in (self.request.params.seed, forward, position)
        )
        return uniform(seed, stream, forward_, position_, torch.arange(lanes))


def _factor_count(best_first: list[float], factor: float) -> int:
    count = len(best_first)
    for n in range(2, count + 1):
        if best_first[n - 1] < 1 - factor / (n + 1):
            return count if n == count else n - 1
    return count


def _keep_top_p(scores: Tensor, top_p: float) -> Tensor:
    if top_p >= 1:
        return scores
    ordered, order = scores.sort(descending=True)
    probability_before = ordered.softmax(-1).cumsum(-1).roll(1)
    probability_before[0] = 0
    kept = scores.clone()
    kept[order[probability_before > top_p]] = -math.inf
    return kept


def _keep_top_k(scores: Tensor, top_k: int) -> Tensor:
    if top_k == 0:
        return scores
    least = scores.topk(min(top_k, len(scores))).values[-1]
    return scores.masked_fill(scores < least, -math.inf)
