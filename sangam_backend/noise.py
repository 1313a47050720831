"""Random numbers that depend on the request alone.

Each draw is a hash of (seed, stream, forward, position, lane), so a request draws the same
numbers whatever else is in its batch. The mixing function is the 32-bit finalizer of
https://github.com/skeeto/hash-prospector, in integer arithmetic that any device has.
"""

from __future__ import annotations

import enum

import torch
from torch import Tensor

LOW_32_BITS = 0xFFFFFFFF


class Stream(enum.IntEnum):
    """Separates the uses of one seed."""

    TOKEN = 1
    CONFIDENCE = 2
    COUNT = 3


def uniform(
    seed: Tensor, stream: Stream, forward: Tensor, position: Tensor, lane: Tensor
) -> Tensor:
    """Uniform draws in (0, 1), float64. The int64 arguments broadcast against each other.

    23 bits of the hash and a half are exact in float32 too, so a kernel draws the same.
    """
    state = _mix(seed & LOW_32_BITS, seed >> 32)
    for part in (torch.full_like(forward, int(stream)), forward, position, lane):
        state = _mix(state, part)
    return ((state >> 9).double() + 0.5) / 2.0**23


def _mix(state: Tensor, part: Tensor) -> Tensor:
    x = (state * 0x9E3779B1 + part + 1) & LOW_32_BITS
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & LOW_32_BITS
    x = ((x ^ (x >> 15)) * 0x846CA68B) & LOW_32_BITS
    return x ^ (x >> 16)
