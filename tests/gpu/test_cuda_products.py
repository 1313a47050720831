"""Tuned matrix products against the same in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sangam_backend.kernels.ops import gated_linear, linear

LAYERS, SIZE, WIDTH = 3, 1024, 1536
TUNED = (16, 32, 64, 192)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("rows", [1, *TUNED])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tuned_products(rows: int, dtype: torch.dtype) -> None:
    from sangam_backend.kernels.products import Products

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device="cuda").div_(shape[-1] ** 0.5)

    weights = [(random(SIZE, SIZE), random(SIZE)) for _ in range(LAYERS)]
    gate_up = [(random(2 * WIDTH, SIZE), None) for _ in range(LAYERS)]
    products = Products()
    products.tune([weights, gate_up], TUNED)
    for count in TUNED:
        products.tune_gated(count, gate_up[0][0], lambda: 1.0)
    limit = 1e-2 if dtype == torch.bfloat16 else 1e-5
    x, (weight, bias), both = random(rows, SIZE) * SIZE**0.5, weights[0], gate_up[0][0]
    expected = linear(x.double(), weight.double(), bias.double())
    assert relative_error(products.linear(x, weight, bias), expected) < limit
    expected = gated_linear(x.double(), both.double())
    assert relative_error(products.gated_linear(x, both), expected) < limit
