"""FlashInfer's paged attention on CUDA, planned on the host and replayed in CUDA graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from sangam_backend.buffers import DeviceState, HostBatch, StepInputs, to_device
from sangam_backend.graphs import GraphSize
from sangam_backend.kernels.layers import rotate_and_store
from sangam_backend.models.transformer import Transformer
from sangam_backend.pages import PAGE_SIZE

# Partial results of split sequences; the largest of 64 blocks of Dream takes more than 320 MB.
WORKSPACE_BYTES = 512 << 20
# Queries of a tile where there are more than 64, heads that share K/V counted as queries.
QUERY_TILE = 128
# A grid of whole sequences this large keeps the device busy without splitting any: measured on an
# H200 at 768 to 4096 positions.
FULL_GRID = 96


class FixedGridWrapper(BatchPrefillWithPagedKVCacheWrapper):  # type: ignore[misc]
    """A wrapper whose launches are the same for every plan, so that a CUDA graph can hold them.

    FlashInfer's own mode for graphs sizes its query tiles for all rows in one sequence, which makes
    blocks of 32 pay for tiles of 128. Without split sequences the grid depends on the number of
    rows alone; what is left to do is to keep the index buffers in place.
    """

    BUFFERS = (
        "_qo_indptr_buf",
        "_paged_kv_indptr_buf",
        "_paged_kv_indices_buf",
        "_paged_kv_last_page_len_buf",
    )

    def __init__(self, workspace: Tensor, rows: int, max_pages: int) -> None:
        super().__init__(workspace, "NHD", backend="fa2")
        sizes = (rows + 1, rows + 1, rows * max_pages, rows)
        self._fixed = [
            torch.zeros(size, dtype=torch.int32, device=workspace.device) for size in sizes
        ]
        self._launch: list[int] | None = None

    def plan(self, *args: Any, **kwargs: Any) -> None:
        super().plan(*args, **kwargs, disable_split_kv=True)
        for name, fixed in zip(self.BUFFERS, self._fixed):
            planned = getattr(self, name)
            fixed[: len(planned)].copy_(planned)
            setattr(self, name, fixed)
        launch = list(self._plan_info)
        assert self._launch in (None, launch), "the captured launch does not fit the plan"
        self._launch = launch


class FlashInferAttention:
    """One FlashInfer wrapper; batches that a CUDA graph replays need one of their own."""

    def __init__(
        self,
        model: Transformer,
        pool: Tensor,
        state: DeviceState,
        workspace: Tensor,
        size: GraphSize | None,
        block_length: int,
    ) -> None:
        """For a CUDA graph of that size; None takes any batch."""
        self.model = model
        self.pool = pool
        self.state = state
        self._planned = torch.cuda.Event()
        self.wrapper = self._new_wrapper(workspace, size, block_length)

    def _new_wrapper(
        self, workspace: Tensor, size: GraphSize | None, block_length: int
    ) -> BatchPrefillWithPagedKVCacheWrapper:
        if size is None:
            return BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        config = self.model.config
        max_pages = self.state.page_table.shape[1]
        packed_queries = block_length * config.num_heads // config.num_kv_heads
        tiles = -(-packed_queries // QUERY_TILE)
        rows = size.rows
        if not size.prefill and rows * tiles * config.num_kv_heads >= FULL_GRID:
            return FixedGridWrapper(workspace, rows, max_pages)

        def indices(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=workspace.device)

        return BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=indices(rows + 1),
            paged_kv_indptr_buf=indices(rows + 1),
            paged_kv_indices_buf=indices(rows * max_pages),
            paged_kv_last_page_len_buf=indices(rows),
            backend="fa2",
        )

    def plan(self, batch: HostBatch, inputs: StepInputs) -> None:
        """See `PagedAttention.plan`."""
        config = self.model.config
        self._inputs = inputs
        # The wrapper's pinned memory must have been read before it is written again.
        self._planned.synchronize()
        indptr, last_page = batch.page_bounds()
        self.wrapper.plan(
            torch.from_numpy(np.concatenate([[0], batch.ends]).astype(np.int32)),
            torch.from_numpy(indptr),
            to_device(np.concatenate(batch.used_pages()), self.pool.device),
            torch.from_numpy(last_page),
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            PAGE_SIZE,
            causal=False,
            q_data_type=self.pool.dtype,
            max_token_per_sequence=int(batch.queries.max()),
            seq_lens=torch.from_numpy(batch.sequences.astype(np.int32)),
        )
        self._planned.record()

    def run(self, layer: int, qkv: Tensor) -> Tensor:
        """See `Attention.run`."""
        config = self.model.config
        inputs = self._inputs
        rotate_and_store(
            qkv,
            inputs.positions,
            inputs.token_slots,
            self.state.page_table,
            self.model.rope,
            self.pool[layer],
            config.num_heads,
            config.num_kv_heads,
            config.rope_in_float32,
        )
        width = config.num_heads * config.head_dim
        q = qkv[:, :width].view(-1, config.num_heads, config.head_dim)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self.wrapper.run(q, self.pool[layer], out=out)
        return out.view(-1, width)
