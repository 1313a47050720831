"""The copy kernel; interpreted where there is no GPU."""

from __future__ import annotations

import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from sangam_backend.kernels.transfer import transfer  # noqa: E402


@pytest.mark.parametrize("size", [1, 1000, 1024, 5000])
def test_there_and_back(size: int) -> None:
    sent = torch.arange(size).flip(0)
    if HAS_GPU:
        sent = sent.pin_memory()
    there = torch.full((size + 1,), -1, device="cuda" if HAS_GPU else "cpu")
    back = torch.full_like(sent, -1, pin_memory=HAS_GPU)
    transfer(sent, there[:size])
    transfer(there[:size], back)
    if HAS_GPU:
        torch.cuda.synchronize()
    assert torch.equal(back, sent)
    assert there[-1] == -1
