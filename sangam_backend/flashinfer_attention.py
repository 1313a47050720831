"""FlashInfer's paged attention on CUDA, planned on the host and replayed in CUDA graphs."""

from __future__ import annotations

import numpy as np
import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from sangam_backend.buffers import DeviceState, HostBatch, StepInputs, to_device
from sangam_backend.kernels.layers import rotate_and_store
from sangam_backend.models.transformer import Transformer
from sangam_backend.pages import PAGE_SIZE

# Partial results of split sequences; the largest of 64 blocks of Dream takes more than 320 MB.
WORKSPACE_BYTES = 512 << 20


class FlashInferAttention:
    """One FlashInfer wrapper; batches that a CUDA graph replays need one of their own."""

    def __init__(
        self,
        model: Transformer,
        pool: Tensor,
        state: DeviceState,
        workspace: Tensor,
        graph_rows: int | None,
    ) -> None:
        """`graph_rows` fixes the number of rows for a CUDA graph; None takes any batch."""
        self.model = model
        self.pool = pool
        self.state = state
        self._planned = torch.cuda.Event()
        if graph_rows is None:
            self.wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
            return

        def indices(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=pool.device)

        self.wrapper = BatchPrefillWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=indices(graph_rows + 1),
            paged_kv_indptr_buf=indices(graph_rows + 1),
            paged_kv_indices_buf=indices(graph_rows * state.page_table.shape[1]),
            paged_kv_last_page_len_buf=indices(graph_rows),
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
