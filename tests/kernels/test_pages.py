"""The copy of pages; interpreted where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from sangam_backend.kernels.pages import copy_pages  # noqa: E402

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


def random_bits(num_pages: int, heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    """Any bits, among them many a NaN."""
    shape = (3, num_pages, 2, 16, heads, head_dim * dtype.itemsize)
    return torch.randint(256, shape, dtype=torch.uint8, device=DEVICE).view(dtype)


def indices(pages: list[int]) -> Tensor:
    return torch.tensor(pages, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 8), (4, 128), (5, 96)])
def test_copies_the_pages_and_nothing_else(dtype: torch.dtype, heads: int, head_dim: int) -> None:
    torch.manual_seed(0)
    source = random_bits(9, heads, head_dim, dtype)
    target = random_bits(5, heads, head_dim, dtype)
    expected = target.clone()
    expected[:, [4, 0, 3]] = source[:, [8, 2, 0]]
    # An odd offset, as of the second row of a table.
    copy_pages(source, indices([7, 8, 2, 0])[1:], target, indices([4, 0, 3]))
    assert torch.equal(target.view(torch.uint8), expected.view(torch.uint8))


def test_within_one_pool() -> None:
    pool = random_bits(4, 2, 8, torch.float32)
    expected = pool[:, [3, 1, 2, 3]].view(torch.uint8)
    copy_pages(pool, indices([3]), pool, indices([0]))
    assert torch.equal(pool.view(torch.uint8), expected)
