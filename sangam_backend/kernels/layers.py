"""Fused parts of a layer. They round where torch rounds.

Tensors must be contiguous. To keep every rounding, arithmetic is in float32 with explicit casts,
and the compiler may not fuse a product and a sum.

On GPUs that can, a kernel is launched while the one before it still runs and waits inside
(programmatic dependent launch), which hides the time that a launch takes.
"""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Of heads; 16 heads of 128 give each of 128 threads one 16-byte access per half.
HEAD_GROUP = 16
# Of columns; gives each of 128 threads one 16-byte access.
SILU_BLOCK = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises rows x [n, d] in float32 and multiplies by the weight in the dtype of x."""
    n, d = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(d)
    _rms_norm[(n,)](
        x,
        weight,
        out,
        eps,
        d,
        block,
        **_row_options(block, x.device),
    )
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Adds x [n, d] into the residual in place and normalises the rounded sum."""
    n, d = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(d)
    _add_rms_norm[(n,)](
        x,
        residual,
        weight,
        out,
        eps,
        d,
        block,
        **_row_options(block, x.device),
    )
    return out


class Tile(NamedTuple):
    """What a program of `gated_linear` computes, and how far it reads ahead."""

    columns: int
    depth: int
    stages: int


def gated_linear(x: Tensor, weight: Tensor, tile: Tile) -> Tensor:
    """silu(gate) * up of x [n, d], where weight [2 * i, d] makes gate and up; [n, i].

    For few rows: each program takes all of them. The tile must divide the weight.
    """
    n, d = x.shape
    width = weight.shape[0] // 2
    assert d % tile.depth == 0
    assert width % tile.columns == 0
    out = torch.empty((n, width), dtype=x.dtype, device=x.device)
    _gated_linear[(width // tile.columns,)](
        x,
        weight,
        out,
        n,
        width,
        d,
        *tile,
        rows=max(triton.next_power_of_2(n), 16),
        num_warps=4,
        **_overlapped(x.device),
    )
    return out


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up [n, 2 * i], the gate first."""
    n, doubled = gate_up.shape
    width = doubled // 2
    out = torch.empty((n, width), dtype=gate_up.dtype, device=gate_up.device)
    chunks = -(-width // SILU_BLOCK)
    _silu_mul[(n * chunks,)](
        gate_up,
        out,
        width,
        SILU_BLOCK,
        chunks,
        num_warps=4,
        **_overlapped(gate_up.device),
    )
    return out


def rotate_and_store(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    page_table: Tensor,
    rope: Tensor,
    pool: Tensor,
    num_heads: int,
    num_kv_heads: int,
    in_float32: bool,
) -> None:
    """Rotates the queries in place, and writes rotated keys and the values to their pages.

    Args:
        qkv: [n, (num_heads + 2 * num_kv_heads) * head_dim]; its keys stay as they are.
        positions, slots: [n]; no two tokens may share both, unless nobody reads their place.
        page_table: [slots, max_pages], int32.
        rope: [2, positions, head_dim], float32, as of `rope_table`.
        pool: [pages, 2, page_size, num_kv_heads, head_dim].
        in_float32: Rotate in float32, else round each step to the dtype of the model.
    """
    page_size, head_dim = pool.shape[2], pool.shape[4]
    groups = -(-(num_heads + 2 * num_kv_heads) // HEAD_GROUP)
    _rotate_and_store[(groups * qkv.shape[0],)](
        qkv,
        positions,
        slots,
        page_table,
        rope,
        pool,
        page_table.stride(0),
        rope.shape[1],
        num_heads,
        num_kv_heads,
        head_dim // 2,
        page_size,
        HEAD_GROUP,
        groups,
        in_float32,
        num_warps=max(HEAD_GROUP * head_dim // 512, 1),
        enable_fp_fusion=False,
        **_overlapped(qkv.device),
    )


def _row_options(block: int, device: torch.device) -> dict[str, int]:
    """Options of a kernel that norms a row a program."""
    warps = min(max(block // 512, 1), 16)
    return {"num_warps": warps, "enable_fp_fusion": False, **_overlapped(device)}


@functools.cache
def _overlapped(device: torch.device) -> dict[str, bool]:
    """Options of a launch that may begin before the kernel in front of it has ended."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"pdl": able, "launch_pdl": able}


@triton.jit
def _enter(pdl: tl.constexpr) -> None:
    """Lets the next kernel be launched, and waits for the results of the one before."""
    if pdl:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _normalise(
    wide: tl.tensor, weight: tl.tensor, eps: tl.tensor, width: tl.constexpr
) -> tl.tensor:
    mean = tl.sum(wide * wide, 0) * (1.0 / width)
    normed = (wide * tl.rsqrt(mean + eps)).to(weight.dtype).to(tl.float32)
    return (normed * weight.to(tl.float32)).to(weight.dtype)


@triton.jit
def _rms_norm(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    _enter(pdl)
    start = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, block)
    mask = columns < width
    wide = tl.load(x + start + columns, mask, 0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask, 0.0)
    tl.store(out + start + columns, _normalise(wide, scale, eps, width), mask)


@triton.jit
def _add_rms_norm(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    _enter(pdl)
    start = tl.program_id(0).to(tl.int64) * width
    columns = tl.arange(0, block)
    mask = columns < width
    wide = tl.load(x + start + columns, mask, 0.0).to(tl.float32)
    old = tl.load(residual + start + columns, mask, 0.0)
    scale = tl.load(weight + columns, mask, 0.0)
    total = (old.to(tl.float32) + wide).to(old.dtype)
    tl.store(residual + start + columns, total, mask)
    tl.store(out + start + columns, _normalise(total.to(tl.float32), scale, eps, width), mask)


@triton.jit
def _silu_mul(
    gate_up: tl.tensor,
    out: tl.tensor,
    width: tl.constexpr,
    block: tl.constexpr,
    chunks: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    _enter(pdl)
    # Rows and chunks share one axis: CUDA caps the others at 65535, and neighbours stay adjacent.
    program = tl.program_id(0)
    row = (program // chunks).to(tl.int64)
    columns = (program % chunks) * block + tl.arange(0, block)
    mask = columns < width
    source = gate_up + row * (2 * width) + columns
    gate = tl.load(source, mask, 0.0)
    up = tl.load(source + width, mask, 0.0)
    tl.store(out + row * width + columns, _gate(gate, up), mask)


@triton.jit
def _gate(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    wide = gate.to(tl.float32)
    activated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    return (activated * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _gated_linear(
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    size: tl.tensor,
    columns: tl.constexpr,
    depth: tl.constexpr,
    stages: tl.constexpr,
    rows: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    _enter(pdl)
    row = tl.arange(0, rows)[:, None]
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    along = tl.arange(0, depth)
    source = x + row * size + along[None, :]
    gates = weight + column[None, :].to(tl.int64) * size + along[:, None]
    ups = gates + width.to(tl.int64) * size
    gate = tl.zeros([rows, columns], tl.float32)
    up = tl.zeros([rows, columns], tl.float32)
    for start in tl.range(0, size, depth, num_stages=stages):
        part = tl.load(source + start, row < num_rows, 0.0)
        gate = tl.dot(part, tl.load(gates + start), gate, input_precision="ieee")
        up = tl.dot(part, tl.load(ups + start), up, input_precision="ieee")
    dtype: tl.constexpr = out.dtype.element_ty
    result = _gate(gate.to(dtype), up.to(dtype))
    tl.store(out + row * width + column[None, :], result, row < num_rows)


# The unspecialised arguments are only read as scalars: their alignment must not cause compiles.
@triton.jit(
    do_not_specialize=["positions", "slots", "page_table", "table_stride", "rope_positions"]
)
def _rotate_and_store(
    qkv: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    page_table: tl.tensor,
    rope: tl.tensor,
    pool: tl.tensor,
    table_stride: tl.tensor,
    rope_positions: tl.tensor,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    half: tl.constexpr,
    page_size: tl.constexpr,
    group: tl.constexpr,
    groups: tl.constexpr,
    in_float32: tl.constexpr,
    pdl: tl.constexpr,
) -> None:
    _enter(pdl)
    head_dim: tl.constexpr = 2 * half
    all_heads: tl.constexpr = num_heads + 2 * num_kv_heads
    dtype: tl.constexpr = qkv.dtype.element_ty
    step: tl.constexpr = tl.float32 if in_float32 else dtype

    program = tl.program_id(0)
    token = (program // groups).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    heads = (program % groups) * group + tl.arange(0, group)[:, None]
    lanes = tl.arange(0, half)[None, :]

    # One thread holds both halves of its pairs, so writing in place cannot overtake a read.
    source = qkv + token * (all_heads * head_dim) + heads * head_dim + lanes
    first = tl.load(source, heads < all_heads, 0.0).to(tl.float32)
    second = tl.load(source + half, heads < all_heads, 0.0).to(tl.float32)
    # The table repeats itself in its second half.
    angles = rope + position * head_dim + lanes
    cos = tl.load(angles).to(step).to(tl.float32)
    sin = tl.load(angles + rope_positions * head_dim).to(step).to(tl.float32)
    page = tl.load(page_table + slot * table_stride + position // page_size).to(tl.int64)

    turned_first = _rounded(first * cos, step) - _rounded(second * sin, step)
    turned_second = _rounded(second * cos, step) + _rounded(first * sin, step)
    is_value = heads >= num_heads + num_kv_heads
    first = tl.where(is_value, first, turned_first).to(dtype)
    second = tl.where(is_value, second, turned_second).to(dtype)
    tl.store(source, first, heads < num_heads)
    tl.store(source + half, second, heads < num_heads)

    # In units of heads, keys of a page come first, then its values.
    place = (page * 2 * page_size + position % page_size) * num_kv_heads
    cached = heads - num_heads + tl.where(is_value, (page_size - 1) * num_kv_heads, 0)
    target = pool + place * head_dim + cached * head_dim + lanes
    is_cached = (heads >= num_heads) & (heads < all_heads)
    tl.store(target, first, is_cached)
    tl.store(target + half, second, is_cached)


@triton.jit
def _rounded(wide: tl.tensor, step: tl.constexpr) -> tl.tensor:
    return wide.to(step).to(tl.float32)
