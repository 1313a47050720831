"""The elementwise parts of a layer: torch's own, and fused kernels that compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Ops(NamedTuple):
    """The elementwise parts of a layer."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x [n, d], weight [d], eps) -> [n, d]"""
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    """(x, residual, weight, eps): adds x into residual in place and norms the sum."""
    silu_mul: Callable[[Tensor], Tensor]
    """gate_up [n, 2 * i], the gate first -> [n, i]"""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises in float32 and multiplies by the weight in the dtype of the model."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x into the residual in place and normalises the sum."""
    return rms_norm(residual.add_(x), weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


TORCH = Ops(rms_norm, add_rms_norm, silu_mul)


def fused() -> Ops:
    """The kernels, for GPUs; an install for CPUs may lack the compiler that this imports."""
    from sangam_backend.kernels import layers

    return Ops(layers.rms_norm, layers.add_rms_norm, layers.silu_mul)
