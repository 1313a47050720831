"""Small copies between the host and the device, in the stream of the kernels around them."""

# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1024


def transfer(source: Tensor, target: Tensor) -> None:
    """Copies a contiguous tensor by a kernel that reads or writes pinned memory itself.

    For some KB this is faster than a copy engine, which the kernels before and after would have to
    wait for. Torch does not see the copy: pinned memory must be kept until it has ended.
    """
    size = source.numel()
    assert source.is_contiguous()
    assert target.is_contiguous()
    assert target.numel() == size
    assert source.dtype == target.dtype
    _transfer[(triton.cdiv(size, CHUNK),)](source, target, size, CHUNK)


@triton.jit(do_not_specialize=["size"])
def _transfer(source: tl.tensor, target: tl.tensor, size: tl.tensor, chunk: tl.constexpr) -> None:
    lanes = tl.program_id(0) * chunk + tl.arange(0, chunk)
    tl.store(target + lanes, tl.load(source + lanes, lanes < size), lanes < size)
