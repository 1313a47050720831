"""Attention over the paged KV pool, for ragged batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sangam_backend.config import ModelConfig
from sangam_backend.pages import PAGE_SIZE


class Span(NamedTuple):
    """One sequence's part of a packed batch."""

    pages: list[int]
    query_start: int
    """Position of its first query; its queries are consecutive."""
    num_queries: int
    sequence_length: int


class PagedSdpaAttention:
    """Torch's SDPA, one sequence at a time: right everywhere, fast nowhere.

    The pool is [layers, pages, 2, PAGE_SIZE, kv_heads, head_dim]; K is stored rotated.
    """

    def __init__(
        self, config: ModelConfig, num_pages: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.num_layers, num_pages, 2, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        self.pool = torch.empty(shape, dtype=dtype, device=device)
        self._spans: list[tuple[Span, Tensor]] = []
        self._new: tuple[Tensor, Tensor] = (torch.empty(0), torch.empty(0))

    def plan(self, spans: Sequence[Span]) -> None:
        """Prepares for a batch whose tokens are those of the spans, one after the other."""
        device = self.pool.device
        self._spans = [(span, torch.tensor(span.pages, device=device)) for span in spans]
        positions = [
            torch.arange(span.query_start, span.query_start + span.num_queries, device=device)
            for span in spans
        ]
        pages = [
            page_table[position // PAGE_SIZE]
            for (_, page_table), position in zip(self._spans, positions)
        ]
        self._new = torch.cat(pages), torch.cat(positions) % PAGE_SIZE

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See `Attention.run` of the models."""
        pool = self.pool[layer]
        page, offset = self._new
        pool[page, 0, offset] = k
        pool[page, 1, offset] = v
        outputs = []
        start = 0
        for span, page_table in self._spans:
            cached = pool[page_table].transpose(0, 1).flatten(1, 2)[:, : span.sequence_length]
            queries = q[start : start + span.num_queries]
            outputs.append(attend(queries, cached[0], cached[1]))
            start += span.num_queries
        return torch.cat(outputs)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Bidirectional attention of q [queries, heads, d] over k, v [keys, kv_heads, d]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return out[0].transpose(0, 1)
