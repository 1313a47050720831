"""Which token each masked position proposes, and which proposals are committed.

Every rule is "rank the masked positions by confidence, commit the k best"; the rules differ in k.
All functions work on a batch of blocks with parameters of their own, so that a batch may mix
rules. The rules are those of LLaDA, Dream and Fast-dLLM (see README, "Generation").
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sangam_backend.config import Family
from sangam_backend.noise import Stream, uniform
from sangam_backend.rules import Confidence, Count

NEVER = float("-inf")
# Codes of the confidence measures in device tables.
MEASURES = list(Confidence)
MARGIN = MEASURES.index(Confidence.MARGIN)
ENTROPY = MEASURES.index(Confidence.ENTROPY)
RANDOM = MEASURES.index(Confidence.RANDOM)


class SamplingRows(NamedTuple):
    """Sampling parameters of the rows of a batch, each [rows]."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    seed: Tensor
    confidence: Tensor
    min_position: Tensor
    """Stop tokens are not proposed before this position."""


class CommitRows(NamedTuple):
    """What this forward does with each row, each [rows]."""

    rule: Tensor
    """A code of `rules.Count`."""
    value: Tensor
    forward: Tensor
    """Counts the request's forwards from 0."""


def propose(
    logits: Tensor,
    positions: Tensor,
    forward: Tensor,
    sampling: SamplingRows,
    family: Family,
    mask_token_id: int,
    stop_token_ids: Tensor,
) -> tuple[Tensor, Tensor]:
    """Proposes a token for each position, with its confidence.

    LLaDA ranks by the probabilities of the plain logits, Dream by those after temperature and
    filters. The work is done in float64 on a CPU, where it costs little and keeps near ties apart.

    Args:
        logits: [rows, block, vocab], already shifted.
        positions: [rows, block], in the sequence.
        stop_token_ids: [stops].

    Returns:
        Tokens int64 and confidences, both [rows, block].
    """
    scores = logits.double() if logits.device.type == "cpu" else logits.float()
    scores[..., mask_token_id] = NEVER
    early = (positions < sampling.min_position[:, None])[..., None]
    scores[..., stop_token_ids] = scores[..., stop_token_ids].masked_fill(early, NEVER)

    temperature = sampling.temperature[:, None, None].to(scores.dtype)
    warm = temperature > 0
    tempered = scores / torch.where(warm, temperature, 1.0)
    tempered = filter_top_k(filter_top_p(tempered, sampling.top_p), sampling.top_k)
    ranked = tempered
    if bool(warm.any()):
        ranked = torch.where(
            warm, tempered + gumbel(tempered, positions, forward, sampling), ranked
        )
    tokens = ranked.argmax(dim=-1)
    probabilities = (tempered if family == "dream" else scores).softmax(dim=-1)
    return tokens, confidence(probabilities, tokens, positions, forward, sampling)


def confidence(
    probabilities: Tensor, tokens: Tensor, positions: Tensor, forward: Tensor, rows: SamplingRows
) -> Tensor:
    """Confidence [rows, block] of proposed tokens by each row's measure."""
    measure = rows.confidence[:, None]
    result = probabilities.gather(-1, tokens[..., None]).squeeze(-1)
    if bool((measure == MARGIN).any()):
        best, second = probabilities.topk(2, dim=-1).values.unbind(-1)
        result = torch.where(measure == MARGIN, best - second, result)
    if bool((measure == ENTROPY).any()):
        negative_entropy = (probabilities * (probabilities + 1e-10).log()).sum(-1)
        result = torch.where(measure == ENTROPY, negative_entropy, result)
    random = (measure == RANDOM).expand_as(positions)
    return torch.where(random, _random_ranks(positions, forward, rows).to(result.dtype), result)


def commit_mask(
    confidences: Tensor,
    masked: Tensor,
    positions: Tensor,
    commit: CommitRows,
    sampling: SamplingRows,
) -> Tensor:
    """Which masked positions commit in this forward, bool [rows, block].

    Equal confidences are taken from the left.
    """
    rule, value = commit.rule[:, None], commit.value[:, None].to(confidences.dtype)
    random_ranks = _random_ranks(positions, commit.forward, sampling).to(confidences.dtype)
    ranked = torch.where(rule == Count.RANDOM, random_ranks, confidences)
    ranked = ranked.masked_fill(~masked, NEVER)
    best_first, order = ranked.sort(dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(order.shape[-1], device=order.device).expand_as(order)
    )
    num_masked = masked.sum(-1, keepdim=True)
    zero = torch.zeros_like(positions[:, :1])
    draw = uniform(sampling.seed[:, None], Stream.COUNT, commit.forward[:, None], zero, zero)
    count = torch.where(rule == Count.QUOTA, value.long(), 1)
    count = torch.where(
        rule == Count.THRESHOLD, (best_first >= value).sum(-1, keepdim=True).clamp(min=1), count
    )
    count = torch.where(rule == Count.FACTOR, factor_count(best_first, num_masked, value), count)
    share = (num_masked.float() * value.float()).long()
    count = torch.where(rule == Count.SHARE, share, count)
    count = torch.where(rule == Count.RANDOM, 1 + (draw * num_masked).long(), count)
    first = torch.arange(rank.shape[-1], device=rank.device) == 0
    return torch.where(rule == Count.FIRST, first, rank < count) & masked


def commit_blocks(
    tokens: Tensor,
    slots: Tensor,
    positions: Tensor,
    lengths: Tensor,
    proposed: Tensor,
    confidences: Tensor,
    commit: CommitRows,
    sampling: SamplingRows,
    mask_token_id: int,
) -> Tensor:
    """Commits proposals into the token table.

    Args:
        tokens: The table [slots, positions]; changed in place.
        slots, lengths: [rows], where each row's block lies and how long it is.
        positions: [rows, block]; columns past a row's block repeat its last position.
        proposed, confidences: [rows, block].

    Returns:
        The blocks' tokens after it, [rows, block].
    """
    columns = torch.arange(positions.shape[1], device=positions.device)
    blocks = tokens[slots[:, None], positions]
    masked = (blocks == mask_token_id) & (columns < lengths[:, None])
    chosen = commit_mask(confidences, masked, positions, commit, sampling)
    blocks = torch.where(chosen, proposed, blocks)
    # Columns past a row's block write its last position too, so they must write the same token.
    blocks = blocks.gather(1, torch.minimum(columns, lengths[:, None] - 1))
    tokens[slots[:, None], positions] = blocks
    return blocks


def factor_count(best_first: Tensor, num_masked: Tensor, factor: Tensor) -> Tensor:
    """Fast-dLLM's factor rule: how many of the confidences, sorted best first, commit.

    The n-th best needs 1 - factor / (n + 1), the best nothing. The first that falls short ends
    the run, except that the very last one falls in when all before it passed.
    """
    n = torch.arange(1, best_first.shape[-1] + 1, device=best_first.device)
    needed = torch.where(n == 1, NEVER, 1.0 - factor / (n + 1))
    short = (best_first < needed) & (n <= num_masked)
    first_short = torch.where(short, n, best_first.shape[-1] + 1).amin(-1, keepdim=True)
    return torch.where(first_short >= num_masked, num_masked, first_short - 1)


def filter_top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    """Drops what lies beyond the smallest set of tokens that holds probability top_p."""
    active = (top_p < 1.0)[:, None, None]
    if not bool(active.any()):
        return scores
    ordered, order = scores.sort(dim=-1, descending=True)
    before = ordered.softmax(dim=-1).cumsum(dim=-1).roll(1, dims=-1)
    before[..., 0] = 0.0
    beyond = torch.zeros_like(order, dtype=torch.bool)
    beyond.scatter_(-1, order, before > top_p[:, None, None].to(before.dtype))
    return scores.masked_fill(beyond & active, NEVER)


def filter_top_k(scores: Tensor, top_k: Tensor) -> Tensor:
    """Drops what scores below the k-th best token; 0 keeps all."""
    if not bool((top_k > 0).any()):
        return scores
    last_kept = (top_k.clamp(1, scores.shape[-1]) - 1)[:, None, None]
    ordered = scores.sort(dim=-1, descending=True).values
    least = ordered.gather(-1, last_kept.expand(*scores.shape[:-1], 1))
    return scores.masked_fill((scores < least) & (top_k > 0)[:, None, None], NEVER)


def gumbel(scores: Tensor, positions: Tensor, forward: Tensor, rows: SamplingRows) -> Tensor:
    """Gumbel noise [rows, block, vocab]: the argmax of scores + noise is a draw from softmax."""
    lanes = torch.arange(scores.shape[-1], device=scores.device)
    draws = uniform(
        rows.seed[:, None, None], Stream.TOKEN, forward[:, None, None], positions[..., None], lanes
    )
    return -(-draws.log()).log().to(scores.dtype)


def _random_ranks(positions: Tensor, forward: Tensor, rows: SamplingRows) -> Tensor:
    lane = torch.zeros_like(positions)
    return uniform(rows.seed[:, None], Stream.CONFIDENCE, forward[:, None], positions, lane)
