"""FlashInfer's attention in bfloat16 against SDPA in float32, on random ragged batches."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from sangam_backend.attention import PagedAttention, SdpaAttention, new_pool
from sangam_backend.buffers import DeviceState, HostBatch, StepInputs, to_device
from sangam_backend.config import ModelConfig
from sangam_backend.graphs import GraphSize
from sangam_backend.models.transformer import Transformer
from sangam_backend.models.weights import allocate
from sangam_backend.plan import Row
from sangam_backend.request import Request
from sangam_backend.rules import Commit, Count

CUDA = torch.device("cuda")
# Half a step of bfloat16 at the outputs' size (below 2), and as much again for q, k and v.
TOLERANCE = 1.6e-2


def model_of(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Transformer:
    config = ModelConfig(
        family="llada",
        hidden_size=heads * head_dim,
        intermediate_size=64,
        num_layers=1,
        num_heads=heads,
        num_kv_heads=kv_heads,
        vocab_size=64,
        rope_theta=1e4,
        rope_in_float32=True,
        rms_norm_eps=1e-5,
        qkv_bias=False,
        logit_shift=0,
        max_sequence_length=2048,
        mask_token_id=63,
        stop_token_ids=frozenset(),
    )
    return allocate(config, dtype, CUDA)


def random_rows(rng: random.Random, count: int, state: DeviceState, num_pages: int) -> list[Row]:
    pages = list(range(num_pages))
    rng.shuffle(pages)
    rows = []
    for slot in range(count):
        length = rng.randint(33, 900)
        request = Request.__new__(Request)
        request.pages = [pages.pop() for _ in range(-(-length // 16))]
        state._set_pages(slot, np.array(request.pages, dtype=np.int32))
        start = rng.randint(0, length - 32)
        commit = Commit(Count.QUOTA, 1.0)
        prefill = rng.random() < 0.3
        rows.append(Row(request, slot, prefill, 0, start, 32, length, 0, commit))
    return rows


def attend_all(attention: PagedAttention, batch: HostBatch, qkv: torch.Tensor) -> torch.Tensor:
    inputs = StepInputs.view(to_device(batch.packed, CUDA), batch.layout)
    attention.plan(batch, inputs)
    return attention.run(0, qkv)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(32, 32, 128), (28, 4, 128), (4, 4, 64)]
)
@pytest.mark.parametrize("in_graph", [False, True])
def test_equals_sdpa(heads: int, kv_heads: int, head_dim: int, in_graph: bool) -> None:
    from sangam_backend.flashinfer_attention import WORKSPACE_BYTES, FlashInferAttention

    rng = random.Random(heads)
    num_pages = 2000
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=CUDA)
    exact_model = model_of(heads, kv_heads, head_dim, torch.float32)
    model = model_of(heads, kv_heads, head_dim, torch.bfloat16)
    pool = new_pool(exact_model, num_pages).normal_()
    for count in (1, 3, 8, 32):
        state = DeviceState(count, 2048, [0, 1], CUDA)
        rows = random_rows(rng, count, state, num_pages)
        if in_graph:
            rows = [row._replace(prefill=False) for row in rows]
        batch = HostBatch(rows, state, logit_shift=0)
        size = GraphSize(32 * count, count, prefill=False)
        width = (heads + 2 * kv_heads) * head_dim
        qkv = torch.randn(batch.layout.num_tokens, width, device=CUDA).bfloat16()
        half_pool = pool.bfloat16()
        exact = SdpaAttention(exact_model, half_pool.float(), state)
        expected = attend_all(exact, batch, qkv.float())
        fast = FlashInferAttention(
            model, half_pool, state, workspace, size if in_graph else None, block_length=32
        )
        out = attend_all(fast, batch, qkv.clone())
        assert float((out.float() - expected).abs().max()) < TOLERANCE
        assert torch.allclose(half_pool.float(), exact.pool, atol=TOLERANCE, rtol=TOLERANCE)
