"""Iterations as CUDA graphs: decodes by number of rows, small prefills by number of tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sangam_backend.attention import PagedAttention
from sangam_backend.buffers import DeviceState, HostBatch, StepInputs, to_device
from sangam_backend.config import EngineConfig
from sangam_backend.device import replay_milliseconds
from sangam_backend.plan import Row
from sangam_backend.request import Request

# A prefill of more tokens keeps the device busy for longer than the host needs to launch it.
PREFILL_TOKENS = range(64, 769, 64)
PREFILL_ROWS = (2, 8)


class GraphSize(NamedTuple):
    tokens: int
    rows: int
    prefill: bool
    """Any rows; False holds one block a row, and nothing else."""


Tune = Callable[[int, Callable[[], float]], None]
Step = Callable[[StepInputs, PagedAttention], Tensor]
NewAttention = Callable[[GraphSize | None], PagedAttention]


def graph_sizes(max_batch_size: int, block_length: int) -> list[GraphSize]:
    """Decodes of 1 to 8 rows, then every fourth number and the largest; prefills after them."""
    fine, coarse = range(1, 9), range(12, max_batch_size, 4)
    counts = sorted({*(n for n in fine if n <= max_batch_size), *coarse, max_batch_size})
    decodes = [GraphSize(n * block_length, n, False) for n in counts]
    prefills = [GraphSize(tokens, rows, True) for rows in PREFILL_ROWS for tokens in PREFILL_TOKENS]
    return decodes + prefills


@dataclass(slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    attention: PagedAttention
    packed: Tensor
    inputs: StepInputs
    blocks: Tensor
    planned_for: list[tuple[Request, int]]
    """Attention plans stay good while the rows stay the same."""


class StepGraphs:
    """One graph a size, from token ids to committed blocks; all share one memory pool."""

    def __init__(
        self,
        state: DeviceState,
        logit_shift: int,
        config: EngineConfig,
        step: Step,
        new_attention: NewAttention,
        tune: Tune | None = None,
    ) -> None:
        """`tune` may change what an iteration of so many decode tokens runs, by its time."""
        self.state = state
        self.logit_shift = logit_shift
        self.block_length = config.block_length
        self.sizes = graph_sizes(config.max_batch_size, config.block_length)
        self.padding_tokens = 0
        self.replayed_tokens = 0
        self._step = step
        self._new_attention = new_attention
        started = time.perf_counter()
        free_before, _ = torch.cuda.mem_get_info()
        pool = torch.cuda.graph_pool_handle()
        for size in self.sizes:
            if tune is not None and not size.prefill:
                tune(size.tokens, lambda size=size: self._time(size, pool))  # type: ignore[misc]
        # The largest first: the smaller ones then fit into its memory.
        largest_first = sorted(self.sizes, key=lambda size: -size.tokens)
        self._graphs = {size: self._capture(size, pool) for size in largest_first}
        torch.cuda.synchronize()
        self.capture_seconds = time.perf_counter() - started
        self.bytes = free_before - torch.cuda.mem_get_info()[0]

    def _time(self, size: GraphSize, pool: Any) -> float:
        """Milliseconds of an iteration on padding rows alone, at best."""
        return replay_milliseconds(self._capture(size, pool).graph)

    def find(self, rows: list[Row]) -> GraphSize | None:
        """The smallest size that holds the rows, if any does."""
        if any(row.block_length != self.block_length for row in rows):
            return None
        prefill = any(row.num_tokens != self.block_length for row in rows)
        tokens = sum(row.num_tokens for row in rows)
        for size in self.sizes:
            spare = size.tokens - tokens
            if size.prefill == prefill and spare >= 0 and len(rows) + (spare > 0) <= size.rows:
                return size
        return None

    def replay(self, rows: list[Row], size: GraphSize) -> tuple[Tensor, Tensor]:
        """Launches a graph that holds the rows.

        Returns:
            Its output, valid until it is launched again; and pinned memory, to be kept until the
            graph has run.
        """
        from sangam_backend.kernels.transfer import transfer

        graph = self._graphs[size]
        batch = self._batch(rows, size)
        packed = torch.from_numpy(batch.packed).pin_memory()
        transfer(packed, graph.packed)
        planned_for = [(row.request, row.num_tokens) for row in rows]
        if planned_for != graph.planned_for:
            graph.attention.plan(batch, graph.inputs)
            graph.planned_for = planned_for
        graph.graph.replay()
        self.padding_tokens += size.tokens - sum(row.num_tokens for row in rows)
        self.replayed_tokens += size.tokens
        return graph.blocks[: len(rows)], packed

    def _batch(self, rows: list[Row], size: GraphSize) -> HostBatch:
        missing = size.rows - len(rows)
        spare = size.tokens - sum(row.num_tokens for row in rows)
        padding = [self.block_length] * missing
        if size.prefill and missing:
            padding = [spare] + [0] * (missing - 1)
        return HostBatch(rows, self.state, self.logit_shift, padding, self.block_length)

    @torch.inference_mode()
    def _capture(self, size: GraphSize, pool: Any) -> _Graph:
        batch = self._batch([], size)
        packed = to_device(batch.packed, self.state.tokens.device)
        inputs = StepInputs.view(packed, batch.layout)
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
        return _Graph(graph, attention, packed, inputs, blocks, [])
