"""The fused elementwise kernels against their torch twins; interpreted where there is no GPU."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from sangam_backend.kernels.ops import TORCH, fused, silu_mul
from sangam_backend.models.transformer import rope_table, rotate

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from sangam_backend.kernels import layers  # noqa: E402

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DTYPES = [torch.bfloat16, torch.float32]
EPS = 1e-5


def convert_float(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Casts between bf16 bits and float32, to the nearest even."""
    if source.primitive_bitwidth == 16:
        return data.astype(np.uint32) << 16
    values = torch.from_numpy(np.array(data, dtype=np.float32))
    return values.bfloat16().view(torch.int16).numpy().view(np.uint16)


@pytest.fixture(autouse=True)
def _nearest_even(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter truncates to bf16, while the GPU rounds to the nearest even."""
    if not HAS_GPU:
        monkeypatch.setattr("triton.runtime.interpreter._convert_float", convert_float)


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def ulps(actual: Tensor, expected: Tensor) -> Tensor:
    """How many representable bf16 numbers apart."""

    def ordered(x: Tensor) -> Tensor:
        bits = x.view(torch.int16).int()
        return torch.where(bits < 0, -32768 - bits, bits)

    return (ordered(actual) - ordered(expected)).abs()


def assert_near(actual: Tensor, expected: Tensor, max_ulps: int = 2) -> None:
    """Equal but for the last bits of float32, which flip few bf16 roundings.

    A flip moves the inner rounding by one ulp, and the product with its factor by up to two.
    In float32, a GPU's exp(x) is 2^(x log2 e), whose rounded exponent costs |x| / 2 ulp.
    """
    assert actual.dtype == expected.dtype
    if actual.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=4e-6, atol=1e-7)
        return
    distance = ulps(actual, expected)
    assert distance.max() <= max_ulps
    assert (distance > 0).float().mean() < 2e-3


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_rounds_as_torch(dtype: torch.dtype) -> None:
    """Squares of small integers sum exactly in any order, so the rest must be equal too."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-31, 32, (9, 512), generator=generator).to(dtype).to(DEVICE)
    weight = random((512,), dtype)
    assert torch.equal(layers.rms_norm(x, weight, EPS), TORCH.rms_norm(x, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "d"), [(1, 512), (33, 448), (7, 3584), (5, 4096), (3, 96)])
def test_rms_norm(n: int, d: int, dtype: torch.dtype) -> None:
    x, weight = random((n, d), dtype, 2) * 3, random((d,), dtype, 3)
    assert_near(layers.rms_norm(x, weight, EPS), TORCH.rms_norm(x, weight, EPS))


def test_rms_norm_of_zeros() -> None:
    x, weight = torch.zeros((2, 96), device=DEVICE), random((96,), torch.float32)
    assert torch.equal(layers.rms_norm(x, weight, EPS), x * weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "d"), [(1, 512), (33, 448), (4, 3584)])
def test_add_rms_norm(n: int, d: int, dtype: torch.dtype) -> None:
    x, residual, weight = random((n, d), dtype, 4), random((n, d), dtype, 5), random((d,), dtype)
    before, twin = x.clone(), residual.clone()
    expected = TORCH.add_rms_norm(x, twin, weight, EPS)
    actual = layers.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(x, before)
    assert torch.equal(residual, twin)
    assert torch.equal(actual, layers.rms_norm(residual, weight, EPS))
    assert_near(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "width"), [(1, 96), (5, 1024), (17, 1536), (3, 18944 // 8)])
def test_silu_mul(n: int, width: int, dtype: torch.dtype) -> None:
    gate_up = random((n, 2 * width), dtype, 6) * 4
    before = gate_up.clone()
    actual = layers.silu_mul(gate_up)
    assert torch.equal(gate_up, before)
    assert_near(actual, silu_mul(gate_up))


# The interpreter's bf16 products are wrong.
@pytest.mark.parametrize("dtype", DTYPES if HAS_GPU else [torch.float32])
@pytest.mark.parametrize(("n", "size", "width"), [(1, 256, 64), (33, 128, 192), (64, 384, 128)])
def test_gated_linear(n: int, size: int, width: int, dtype: torch.dtype) -> None:
    """Small whole numbers, whose products sum exactly in any order."""
    generator = torch.Generator().manual_seed(width)

    def whole(*shape: int) -> Tensor:
        return torch.randint(-1, 2, shape, generator=generator).to(dtype).to(DEVICE)

    x, weight = whole(n, size), whole(2 * width, size)
    actual = layers.gated_linear(x, weight, layers.Tile(64, 64, 2))
    assert_near(actual, TORCH.gated_linear(x, weight))


def test_products_not_tuned() -> None:
    ops, _ = fused()
    x, weight = random((5, 96), torch.float32), random((64, 96), torch.float32)
    assert torch.equal(ops.linear(x, weight, weight[:, 0]), x @ weight.T + weight[:, 0])
    assert_near(ops.gated_linear(x, weight), silu_mul(x @ weight.T))


@pytest.mark.filterwarnings("ignore:overflow")
def test_silu_of_every_bf16() -> None:
    gate = torch.arange(-32768, 32768).to(torch.int16).view(torch.bfloat16).to(DEVICE)
    gate = gate[gate.isfinite()].reshape(255, -1)
    gate_up = torch.cat([gate, torch.ones_like(gate)], dim=1)
    actual, expected = layers.silu_mul(gate_up), silu_mul(gate_up)
    # Beyond, the exponential nears the end of float32, where GPUs divide to zero.
    usual = gate > -80
    assert_near(actual[usual], expected[usual], max_ulps=1)
    assert actual[~usual].abs().max() < 1e-30
    assert expected[~usual].abs().max() < 1e-30


class Shape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


SHAPES = [Shape(4, 2, 64), Shape(4, 4, 128), Shape(14, 2, 128), Shape(32, 32, 128), Shape(3, 1, 8)]
PAGE_SIZE = 16
POSITIONS = 96


class Batch(NamedTuple):
    qkv: Tensor
    positions: Tensor
    slots: Tensor
    page_table: Tensor
    rope: Tensor
    pool: Tensor

    @classmethod
    def make(cls, n: int, shape: Shape, dtype: torch.dtype) -> Batch:
        """n tokens at distinct places of three slots, whose pages are scattered over the pool."""
        generator = torch.Generator().manual_seed(n)
        max_pages = POSITIONS // PAGE_SIZE
        places = torch.randperm(3 * POSITIONS, generator=generator)[:n]
        pages = torch.randperm(3 * max_pages + 5, generator=generator)[: 3 * max_pages]
        width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        pool = (3 * max_pages + 5, 2, PAGE_SIZE, shape.num_kv_heads, shape.head_dim)
        return cls(
            random((n, width), dtype, 7),
            (places % POSITIONS).to(DEVICE),
            (places // POSITIONS).to(DEVICE),
            pages.reshape(3, max_pages).int().to(DEVICE),
            rope_table(shape.head_dim, POSITIONS, 500000.0, DEVICE),
            random(pool, dtype, 8),
        )


def rotate_and_store(batch: Batch, shape: Shape, in_float32: bool) -> None:
    """The twin of the kernel."""
    heads, kv_heads, head_dim = shape
    q, k, v = batch.qkv.unflatten(-1, (-1, head_dim)).split([heads, kv_heads, kv_heads], dim=1)
    cos, sin = batch.rope[:, batch.positions, None]
    page = batch.page_table[batch.slots, batch.positions // PAGE_SIZE].long()
    offset = batch.positions % PAGE_SIZE
    q.copy_(rotate(q, cos, sin, in_float32))
    batch.pool[page, 0, offset] = rotate(k, cos, sin, in_float32)
    batch.pool[page, 1, offset] = v


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_float32", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("n", [1, 37])
def test_rotate_and_store(n: int, shape: Shape, in_float32: bool, dtype: torch.dtype) -> None:
    """All of the pool and of qkv is compared, so nothing else was written."""
    batch = Batch.make(n, shape, dtype)
    twin = batch._replace(qkv=batch.qkv.clone(), pool=batch.pool.clone())
    unchanged = batch.pool.clone()
    rotate_and_store(twin, shape, in_float32)
    layers.rotate_and_store(*batch, shape.num_heads, shape.num_kv_heads, in_float32)
    assert torch.equal(batch.qkv, twin.qkv)
    assert torch.equal(batch.pool, twin.pool)
    written = (batch.pool != unchanged).any(-1).any(-1)
    assert written.sum() == 2 * n


@pytest.mark.parametrize("in_float32", [True, False])
def test_rotate_tells_precisions_apart(in_float32: bool) -> None:
    shape = SHAPES[0]
    batch = Batch.make(37, shape, torch.bfloat16)
    twin = batch._replace(qkv=batch.qkv.clone(), pool=batch.pool.clone())
    rotate_and_store(twin, shape, not in_float32)
    layers.rotate_and_store(*batch, shape.num_heads, shape.num_kv_heads, in_float32)
    assert not torch.equal(batch.qkv, twin.qkv)


def test_no_tokens() -> None:
    shape = SHAPES[0]
    batch = Batch.make(0, shape, torch.bfloat16)
    before = batch.pool.clone()
    layers.rotate_and_store(*batch, shape.num_heads, shape.num_kv_heads, True)
    assert torch.equal(batch.pool, before)
    x = random((0, 96), torch.bfloat16)
    assert layers.rms_norm(x, x.new_ones(96), EPS).shape == (0, 96)
    assert layers.silu_mul(x).shape == (0, 48)


def test_twins_are_the_lines_of_the_model() -> None:
    """The model's forward once spelled these out; its results must stay the same bits."""
    x, residual, weight = (random(s, torch.float32, 9) for s in ((5, 96), (5, 96), (96,)))
    total = residual + x.flip(0)
    normed = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + EPS) * weight
    assert torch.equal(TORCH.add_rms_norm(x.flip(0), residual, weight, EPS), normed)
    assert torch.equal(residual, total)
    gate, up = x.chunk(2, dim=-1)
    assert torch.equal(silu_mul(x), torch.nn.functional.silu(gate) * up)
