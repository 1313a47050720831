"""Counts of durations, as Prometheus keeps them."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0)
"""Seconds."""


class Histogram:
    def __init__(self) -> None:
        self.sum = 0.0
        self._counts = [0] * (len(BOUNDS) + 1)

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS, seconds)] += 1
        self.sum += seconds

    def cumulative(self) -> list[int]:
        """How many were no longer than each bound, and how many there were."""
        return list(accumulate(self._counts))
