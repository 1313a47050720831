"""The batched rules: each against a plain computation, and the schedules against torch."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sangam_backend import rules
from sangam_backend.noise import Stream, uniform
from sangam_backend.rules import Count
from sangam_backend.unmasking import (
    CommitRows,
    SamplingRows,
    commit_mask,
    factor_count,
    filter_top_k,
    filter_top_p,
    propose,
)

NO_STOPS = torch.tensor([], dtype=torch.int64)


def sampling_rows(rows: int, **values: float) -> SamplingRows:
    defaults = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "seed": 3}
    defaults |= {"confidence": 0, "min_position": 0} | values
    floats = ("temperature", "top_p")
    return SamplingRows(
        **{
            name: torch.full((rows,), value, dtype=torch.float64 if name in floats else torch.int64)
            for name, value in defaults.items()
        }
    )


def commit(confidences: list[float], masked: list[bool], count: Count, value: float) -> list[int]:
    rows = CommitRows(torch.tensor([int(count)]), torch.tensor([value]), torch.tensor([0]))
    positions = torch.arange(len(masked))[None]
    chosen = commit_mask(
        torch.tensor([confidences]).double(),
        torch.tensor([masked]),
        positions,
        rows,
        sampling_rows(1),
    )
    return [int(i) for i in chosen[0].nonzero()]


CONFIDENCES = [0.5, 0.95, 0.2, 0.9, 0.9, 0.99]
ALL = [True] * 6


@pytest.mark.parametrize(
    ("count", "value", "masked", "expected"),
    [
        (Count.THRESHOLD, 0.9, ALL, [1, 3, 4, 5]),
        (Count.THRESHOLD, 0.995, ALL, [5]),
        (Count.THRESHOLD, 0.9, [True, False, True, False, False, False], [0]),
        (Count.THRESHOLD, 0.9, [False] * 6, []),
        (Count.QUOTA, 3, ALL, [1, 3, 5]),
        (Count.QUOTA, 99, ALL, [0, 1, 2, 3, 4, 5]),
        (Count.QUOTA, 0, ALL, []),
        (Count.SHARE, 0.34, ALL, [1, 5]),
        (Count.SHARE, 0.16, ALL, []),
        (Count.SHARE, 1.0, ALL, [0, 1, 2, 3, 4, 5]),
        (Count.FACTOR, 1.0, ALL, [1, 3, 4, 5]),
        (Count.FACTOR, 1.0, [True, False, True, False, False, False], [0, 2]),
        (Count.FIRST, 0, ALL, [0]),
    ],
)
def test_rules(count: Count, value: float, masked: list[bool], expected: list[int]) -> None:
    assert commit(CONFIDENCES, masked, count, value) == expected


@settings(deadline=None)
@given(
    st.lists(st.floats(-30, 1), min_size=1, max_size=12),
    st.floats(0, 10),
    st.sampled_from([Count.THRESHOLD, Count.FACTOR, Count.RANDOM]),
)
def test_a_rule_without_a_schedule_always_commits(
    confidences: list[float], value: float, count: Count
) -> None:
    assert commit(confidences, [True] * len(confidences), count, value)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=12), st.floats(0, 3))
def test_factor_counts_as_written(confidences: list[float], factor: float) -> None:
    best_first = sorted(confidences, reverse=True)
    total = len(best_first)
    short = [n for n in range(2, total + 1) if best_first[n - 1] < 1 - factor / (n + 1)]
    expected = total if not short or short[0] == total else short[0] - 1
    counted = factor_count(
        torch.tensor([best_first]).double(), torch.tensor([[total]]), torch.tensor([[factor]])
    )
    assert int(counted) == expected


@pytest.mark.parametrize("steps", [1, 2, 3, 7, 8, 32, 33, 100, 1023])
def test_dream_shares_equal_torch(steps: int) -> None:
    times = torch.linspace(1, rules.DREAM_EPS, steps + 1)
    for i in range(steps - 1):
        assert rules.dream_share(steps, i) == float(1 - times[i + 1] / times[i]), i
    assert rules.dream_share(steps, steps - 1) == 1.0


@given(st.integers(1, 64), st.integers(1, 64))
def test_llada_quotas_fill_the_block(block_length: int, steps: int) -> None:
    quotas = [rules.llada_quota(block_length, steps, i) for i in range(steps)]
    assert sum(quotas) == block_length
    assert max(quotas) - min(quotas) <= 1


def test_steps_split_over_blocks() -> None:
    assert [rules.steps_of_block(10, 4, b) for b in range(4)] == [3, 3, 2, 2]


def test_filters() -> None:
    scores = torch.tensor([[[4.0, 3.0, 2.0, 3.0]]]).double()
    kept = filter_top_k(scores, torch.tensor([2]))
    assert kept.isinf().tolist() == [[[False, False, True, False]]]
    probabilities = torch.tensor([[[0.5, 0.3, 0.15, 0.05]]]).double()
    kept = filter_top_p(probabilities.log(), torch.tensor([0.75]))
    assert kept.isinf().tolist() == [[[False, False, True, True]]]


def test_the_mask_and_early_stops_are_never_proposed() -> None:
    logits = torch.zeros(1, 4, 10)
    logits[..., 7] = 50.0
    logits[..., 5] = 40.0
    tokens, _ = propose(
        logits,
        torch.tensor([[10, 11, 12, 13]]),
        torch.tensor([0]),
        sampling_rows(1, min_position=12),
        "llada",
        mask_token_id=7,
        stop_token_ids=torch.tensor([5]),
    )
    assert 7 not in tokens
    assert (tokens == 5).tolist() == [[False, False, True, True]]


def test_family_confidences() -> None:
    logits = torch.tensor([[[2.0, 1.0, 0.0]]])
    arguments = (torch.tensor([[0]]), torch.tensor([0]), sampling_rows(1, temperature=0.5, top_k=2))
    for family, scores in (("llada", [2.0, 1.0, 0.0]), ("dream", [4.0, 2.0, -math.inf])):
        tokens, confidence = propose(logits.clone(), *arguments, family, 2, NO_STOPS)  # type: ignore[arg-type]
        allowed = torch.tensor(scores[:2]).double().softmax(-1)
        assert float(confidence) == pytest.approx(float(allowed[int(tokens)]))


def test_samples_follow_the_distribution() -> None:
    rows = 20000
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().repeat(rows, 1, 1)
    seeds = sampling_rows(rows, temperature=1.0)._replace(seed=torch.arange(rows))
    tokens, _ = propose(
        torch.cat([logits, torch.full((rows, 1, 1), -1e9)], -1),
        torch.zeros(rows, 1, dtype=torch.int64),
        torch.zeros(rows, dtype=torch.int64),
        seeds,
        "llada",
        4,
        NO_STOPS,
    )
    shares = torch.bincount(tokens.flatten(), minlength=4) / rows
    assert torch.allclose(shares, torch.tensor([0.5, 0.3, 0.15, 0.05]), atol=0.012)


def test_noise_is_uniform_and_apart_by_every_argument() -> None:
    def draws(seed: int, stream: Stream, forward: int, position: int) -> torch.Tensor:
        seed_, forward_, position_ = (torch.tensor([v]) for v in (seed, forward, position))
        return uniform(seed_, stream, forward_, position_, torch.arange(50000))

    base = draws(1 << 40, Stream.TOKEN, 2, 3)
    assert torch.equal(base, draws(1 << 40, Stream.TOKEN, 2, 3))
    assert float(base.min()) > 0
    assert float(base.max()) < 1
    deciles = torch.histc(base.float(), 10, 0, 1) / len(base)
    assert torch.allclose(deciles, torch.full((10,), 0.1), atol=0.006)
    for other in (
        draws((1 << 40) + 1, Stream.TOKEN, 2, 3),
        draws((1 << 41), Stream.TOKEN, 2, 3),
        draws(1 << 40, Stream.COUNT, 2, 3),
        draws(1 << 40, Stream.TOKEN, 3, 2),
        draws(1 << 40, Stream.TOKEN, 2, 4),
    ):
        assert abs(float(torch.corrcoef(torch.stack([base, other]))[0, 1])) < 0.02
