"""The plot of a load test."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench_serve import Outcome


def plot(path: Path, outcomes: Sequence[Outcome], samples: Mapping[str, Sequence[float]]) -> None:
    """Distributions of the samples, by metric in seconds, and what went on over time."""
    from matplotlib.figure import Figure

    good = [outcome for outcome in outcomes if not outcome.error]
    figure = Figure(figsize=(11, 7), layout="constrained")
    (distribution, course), (running, speed) = figure.subplots(2, 2)
    for name, values in samples.items():
        distribution.plot(*_distribution(values), label=name)
    for name in ("first text", "latency"):
        course.scatter([outcome.arrival for outcome in good], samples[name], s=8, label=name)
    failed = [outcome.arrival for outcome in outcomes if outcome.error]
    course.plot(failed, [0.0] * len(failed), "rx", label="failed")
    running.step(*_in_flight(outcomes), where="post")
    speed.step(*_tokens_per_second(good), where="post")
    distribution.set(xlabel="seconds", ylabel="% of them", xscale="log")
    course.set(xlabel="arrival, s", ylabel="seconds")
    running.set(xlabel="time, s", ylabel="requests in flight")
    speed.set(xlabel="time, s", ylabel="tokens/s of the answers that end")
    distribution.legend()
    course.legend()
    figure.savefig(path)


def _distribution(values: Sequence[float]) -> tuple[list[float], list[float]]:
    ordered = sorted(value for value in values if not math.isnan(value))
    return ordered, [100 * (index + 1) / len(ordered) for index in range(len(ordered))]


def _in_flight(outcomes: Sequence[Outcome]) -> tuple[list[float], list[int]]:
    """How many requests have been due and have not ended, from each moment on."""
    changes = sorted(change for outcome in outcomes for change in _changes(outcome))
    return [time for time, _ in changes], list(accumulate(change for _, change in changes))


def _changes(outcome: Outcome) -> Iterator[tuple[float, int]]:
    yield outcome.arrival, 1
    yield outcome.arrival + outcome.latency, -1


def _tokens_per_second(good: Sequence[Outcome]) -> tuple[list[int], list[int]]:
    """In each second, the tokens of the answers that end in it."""
    ends = [math.floor(outcome.arrival + outcome.latency) for outcome in good]
    seconds = list(range(max(ends, default=-1) + 2))
    tokens = [0] * len(seconds)
    for end, outcome in zip(ends, good):
        tokens[end] += outcome.output_tokens
    return seconds, tokens
