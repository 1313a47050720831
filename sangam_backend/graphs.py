"""Decode iterations as CUDA graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sangam_backend.attention import PagedAttention
from sangam_backend.buffers import DeviceState, HostBatch, StepInputs
from sangam_backend.config import EngineConfig
from sangam_backend.plan import Row
from sangam_backend.request import Request

Step = Callable[[StepInputs, PagedAttention], Tensor]
NewAttention = Callable[[int | None], PagedAttention]


def graph_sizes(max_batch_size: int) -> list[int]:
    """Rows that graphs are captured for: all up to 8, then every fourth, and the largest."""
    fine, coarse = range(1, 9), range(12, max_batch_size, 4)
    return sorted({*(n for n in fine if n <= max_batch_size), *coarse, max_batch_size})


@dataclass(slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    attention: PagedAttention
    integers: Tensor
    values: Tensor
    inputs: StepInputs
    blocks: Tensor
    planned_for: list[Request]
    """Attention plans stay good while the rows stay the same."""


class DecodeGraphs:
    """One graph a size, from token ids to committed blocks; all share one memory pool."""

    def __init__(
        self,
        state: DeviceState,
        logit_shift: int,
        config: EngineConfig,
        step: Step,
        new_attention: NewAttention,
    ) -> None:
        self.state = state
        self.logit_shift = logit_shift
        self.block_length = config.block_length
        self.sizes = graph_sizes(config.max_batch_size)
        self.padding_rows = 0
        self.replayed_rows = 0
        self._step = step
        self._new_attention = new_attention
        started = time.perf_counter()
        free_before, _ = torch.cuda.mem_get_info()
        pool = torch.cuda.graph_pool_handle()
        # The largest first: the smaller ones then fit into its memory.
        self._graphs = {size: self._capture(size, pool) for size in reversed(self.sizes)}
        torch.cuda.synchronize()
        self.capture_seconds = time.perf_counter() - started
        self.bytes = free_before - torch.cuda.mem_get_info()[0]

    def fit(self, rows: list[Row]) -> bool:
        """Whether a graph can run these rows."""
        return len(rows) <= self.sizes[-1] and all(
            not row.prefill and row.block_length == self.block_length for row in rows
        )

    def replay(self, rows: list[Row]) -> Tensor:
        """Launches the graph of the next size. Its output stays valid until the next replay."""
        size = next(size for size in self.sizes if size >= len(rows))
        graph = self._graphs[size]
        batch = self._batch(rows, size)
        integers, values = batch.to_device(self.state.tokens.device)
        graph.integers.copy_(integers)
        graph.values.copy_(values)
        requests = [row.request for row in rows]
        if requests != graph.planned_for:
            graph.attention.plan(batch, graph.inputs)
            graph.planned_for = requests
        graph.graph.replay()
        self.padding_rows += size - len(rows)
        self.replayed_rows += size
        return graph.blocks[: len(rows)]

    def _batch(self, rows: list[Row], size: int) -> HostBatch:
        padding = size - len(rows)
        return HostBatch(rows, self.state, self.logit_shift, padding, self.block_length)

    @torch.inference_mode()
    def _capture(self, size: int, pool: Any) -> _Graph:
        batch = self._batch([], size)
        integers, values = batch.to_device(self.state.tokens.device)
        inputs = StepInputs.view(integers, values, batch.layout)
        attention = self._new_attention(size)
        attention.plan(batch, inputs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(inputs, attention)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            blocks = self._step(inputs, attention)
        return _Graph(graph, attention, integers, values, inputs, blocks, [])
