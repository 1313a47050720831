"""The parts of a layer: torch's own, and fused kernels that compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from sangam_backend.kernels.products import Products

# MKL multiplies fewer rows than this with other kernels, whose sums differ in the last bit.
# With at least so many rows a token's result is the same in every batch.
CPU_MIN_ROWS = 16


class Ops(NamedTuple):
    """The parts of a layer besides attention."""

    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """(x [n, d], weight [m, d], bias [m]) -> [n, m]"""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x [n, d], weight [d], eps) -> [n, d]"""
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    """(x, residual, weight, eps): adds x into residual in place and norms the sum."""
    gated_linear: Callable[[Tensor, Tensor], Tensor]
    """(x [n, d], weight [2 * i, d], the gate first): silu(gate) * up -> [n, i]"""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises in float32 and multiplies by the weight in the dtype of the model."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x into the residual in place and normalises the sum."""
    return rms_norm(residual.add_(x), weight, eps)


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """The product that opens an MLP, and its activation."""
    return silu_mul(linear(x, weight))


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = x.shape[0]
    if x.device.type == "cpu" and rows < CPU_MIN_ROWS:
        return F.linear(F.pad(x, (0, 0, 0, CPU_MIN_ROWS - rows)), weight, bias)[:rows]
    return F.linear(x, weight, bias)


TORCH = Ops(linear, rms_norm, add_rms_norm, gated_linear)


def fused() -> tuple[Ops, Products]:
    """The kernels, for GPUs; an install for CPUs may lack the compiler that this imports."""
    from sangam_backend.kernels import layers
    from sangam_backend.kernels.products import Products

    products = Products()
    ops = Ops(products.linear, layers.rms_norm, layers.add_rms_norm, products.gated_linear)
    return ops, products
