"""The unmasking rules by name, and how many positions each forward of a block commits."""

from __future__ import annotations

import enum
import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sangam_backend.config import Family

DREAM_EPS = 1e-3


class Unmasking(enum.Enum):
    """The rules a request may name."""

    THRESHOLD = "threshold"
    FACTOR = "factor"
    QUOTA = "quota"
    STEPS = "steps"
    RANDOM = "random"


class Confidence(enum.Enum):
    """By what masked positions are ranked."""

    PROBABILITY = "probability"
    MARGIN = "margin"
    ENTROPY = "entropy"
    RANDOM = "random"


class Count(enum.IntEnum):
    """How many positions a forward commits, given the rule's one number, its value."""

    THRESHOLD = 0
    """All whose confidence reaches value, and always the best."""
    FACTOR = 1
    """Fast-dLLM's factor rule with factor value."""
    QUOTA = 2
    """value of them."""
    SHARE = 3
    """The integer part of value times the number of masks, as Dream's schedule has it."""
    RANDOM = 4
    """A random number."""
    FIRST = 5
    """The block's first position alone: Dream's prefill."""


class Commit(NamedTuple):
    """What one forward commits of a block."""

    rule: Count
    value: float

    def foresee(self, masks: int) -> int | None:
        """How many of a block's masks this forward commits; None where only the device knows."""
        if self.rule is Count.FIRST:
            return 1
        if self.rule is Count.QUOTA:
            return min(int(self.value), masks)
        if self.rule is Count.SHARE:
            return int(np.float32(masks) * np.float32(self.value))
        return None


def steps_of_block(steps: int, num_blocks: int, block: int) -> int:
    """Splits the forwards of the `steps` rule over the blocks, earlier ones first."""
    share, rest = divmod(steps, num_blocks)
    return share + (block < rest)


def llada_quota(block_length: int, steps: int, forward: int) -> int:
    """LLaDA's integer quotas: how many of a block's masks its forward-th of steps commits."""
    share, rest = divmod(block_length, steps)
    return share + (forward < rest)


def dream_share(steps: int, forward: int, eps: float = DREAM_EPS) -> float:
    """Dream's schedule: the share of a block's masks that its forward-th of steps commits.

    1 - t[i+1] / t[i] over times t falling evenly from 1 to eps, and all in the last; in float32,
    because the integer part of share times masks depends on it.
    """
    if forward >= steps - 1:
        return 1.0
    times = _dream_times(steps, eps)
    return float(np.float32(1.0) - times[forward + 1] / times[forward])


@functools.lru_cache(maxsize=256)
def _dream_times(steps: int, eps: float) -> NDArray[np.float32]:
    """torch.linspace(1, eps, steps + 1) in float32, bit for bit.

    It counts from both ends, and rounds once after each multiply-add, as float64 does here.
    """
    last = np.float32(eps)
    step = np.float64((last - np.float32(1.0)) / np.float32(steps))
    index = np.arange(steps + 1)
    half = (steps + 1) // 2
    times = np.concatenate([1.0 + step * index[:half], last - step * (steps - index[half:])])
    rounded: NDArray[np.float32] = times.astype(np.float32)
    return rounded


def min_steps_per_block(family: Family, block_length: int) -> int:
    """Dream's prefill commits one token, so a longer block needs a second forward."""
    return 2 if family == "dream" and block_length > 1 else 1
