"""Copying pages between two KV pools."""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Of 4-byte numbers; gives each of 128 threads eight 16-byte accesses, enough to keep a link between
# two GPUs busy.
CHUNK = 4096


def copy_pages(
    source_pool: Tensor, source_pages: Tensor, target_pool: Tensor, target_pages: Tensor
) -> None:
    """Copies pages of all layers, by a kernel that reads the source where it lies.

    Args:
        source_pool, target_pool: [layers, pages, ...], contiguous; they may differ in pages only.
            The source may be memory of another process or GPU that the target's GPU can read.
        source_pages, target_pages: [n], int32, on the target's device, n > 0.
    """
    assert source_pool.dtype == target_pool.dtype
    assert source_pages.numel() == target_pages.numel()
    # Bits are copied, not values, so one kernel serves all dtypes.
    source, target = (pool.flatten(2).view(torch.int32) for pool in (source_pool, target_pool))
    layers, _, size = target.shape
    count = source_pages.numel()
    chunks = triton.cdiv(size, CHUNK)
    _copy_pages[(layers * count * chunks,)](
        source,
        source_pages,
        target,
        target_pages,
        source.shape[1],
        target.shape[1],
        count,
        size,
        CHUNK,
        chunks,
        num_warps=4,
    )


@triton.jit(
    do_not_specialize=["source_pages", "target_pages", "source_size", "target_size", "count"]
)
def _copy_pages(
    source: tl.tensor,
    source_pages: tl.tensor,
    target: tl.tensor,
    target_pages: tl.tensor,
    source_size: tl.tensor,
    target_size: tl.tensor,
    count: tl.tensor,
    page_size: tl.constexpr,
    chunk: tl.constexpr,
    chunks: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    lanes = (program % chunks) * chunk + tl.arange(0, chunk)
    entry = program // chunks % count
    layer = (program // chunks // count).to(tl.int64)
    # The page size is a constant, so that the compiler sees that pages start at 16-byte borders.
    read = (layer * source_size + tl.load(source_pages + entry)) * page_size + lanes
    written = (layer * target_size + tl.load(target_pages + entry)) * page_size + lanes
    tl.store(target + written, tl.load(source + read, lanes < page_size), lanes < page_size)
