"""Attention over the paged KV pool, for ragged batches."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sangam_backend.buffers import DeviceState, HostBatch, StepInputs
from sangam_backend.models.transformer import Attention, Transformer, split_and_rotate
from sangam_backend.pages import PAGE_SIZE
from sangam_backend.transport import Transport


class PagedAttention(Attention, Protocol):
    """Attention that is told of each batch before the model runs.

    The pool is [layers, pages, 2, PAGE_SIZE, kv_heads, head_dim]; K is stored rotated.
    """

    def plan(self, batch: HostBatch, inputs: StepInputs) -> None:
        """Prepares for a batch; may copy to the device, but never waits for it."""
        ...


def new_pool(model: Transformer, num_pages: int, transport: Transport | None = None) -> Tensor:
    """The KV pool; with a transport, in memory that other instances can pull from."""
    config = model.config
    shape = (config.num_layers, num_pages, 2, PAGE_SIZE, config.num_kv_heads, config.head_dim)
    if transport is not None:
        return transport.new_pool(shape, model.head.dtype)
    return torch.empty(shape, dtype=model.head.dtype, device=model.head.device)


class SdpaAttention:
    """Torch's SDPA, one sequence at a time: right everywhere, fast nowhere."""

    def __init__(self, model: Transformer, pool: Tensor, state: DeviceState) -> None:
        self.model = model
        self.pool = pool
        self.state = state
        self._spans: list[tuple[int, int, Tensor]] = []

    def plan(self, batch: HostBatch, inputs: StepInputs) -> None:
        self._positions = inputs.positions
        pages = self.state.page_table[inputs.token_slots, inputs.positions // PAGE_SIZE]
        self._stored_at = pages, inputs.positions % PAGE_SIZE
        self._spans = [
            (int(queries), int(sequence), torch.from_numpy(pages).to(self.pool.device))
            for queries, sequence, pages in zip(batch.queries, batch.sequences, batch.pages)
        ]

    def run(self, layer: int, qkv: Tensor) -> Tensor:
        """See `Attention.run`."""
        q, k, v = split_and_rotate(qkv, self._positions, self.model.rope, self.model.config)
        pool = self.pool[layer]
        pages, offsets = self._stored_at
        pool[pages, 0, offsets] = k
        pool[pages, 1, offsets] = v
        outputs = []
        start = 0
        for num_queries, length, pages in self._spans:
            cached = pool[pages].transpose(0, 1).flatten(1, 2)[:, :length]
            outputs.append(attend(q[start : start + num_queries], cached[0], cached[1]))
            start += num_queries
        return torch.cat(outputs).flatten(1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Bidirectional attention of q [queries, heads, d] over k, v [keys, kv_heads, d]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return out[0].transpose(0, 1)
