"""Runs planned iterations on one device, launched without waiting for their results."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sangam_backend import unmasking
from sangam_backend.attention import PagedAttention, SdpaAttention, new_pool
from sangam_backend.buffers import DeviceState, HostBatch, StepInputs, to_device
from sangam_backend.config import ConfigError, EngineConfig
from sangam_backend.graphs import GraphSize, StepGraphs, graph_sizes
from sangam_backend.models.transformer import Transformer
from sangam_backend.pages import PAGE_SIZE
from sangam_backend.plan import StepPlan
from sangam_backend.request import Request
from sangam_backend.transport import Transport

# The weights of so many are more than a GPU's cache holds.
TUNED_LAYERS = 4


class Launch(NamedTuple):
    """An iteration under way."""

    plan: StepPlan
    blocks: Tensor
    """[rows, longest block] on the host, once `done`."""
    done: torch.cuda.Event | None
    inputs: Tensor | None = None
    """Pinned memory that the device reads until `done`."""

    def wait(self) -> list[list[int]]:
        """For each row its block's tokens, with the mask id where nothing is committed yet."""
        if self.done is not None:
            self.done.synchronize()
        rows = self.blocks.tolist()
        return [block[: row.block_length] for row, block in zip(self.plan.rows, rows)]


class Runner:
    """The model, the KV pool and the device tables of one instance."""

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        num_pages: int,
        transport: Transport | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.device = model.head.device
        padding = range(num_pages, num_pages + -(-config.block_length // PAGE_SIZE))
        self.state = DeviceState(
            config.max_batch_size, model.config.max_sequence_length, padding, self.device
        )
        self.pool = new_pool(model, num_pages + len(padding), transport)
        self.stop_token_ids = torch.tensor(
            sorted(model.config.stop_token_ids), dtype=torch.int64, device=self.device
        )
        self.workspace = new_workspace(config, self.device)
        self.attention = self._new_attention(None)
        if self.device.type == "cuda":
            from sangam_backend.kernels import ops, transfer, unmask

            self._propose, self._commit_blocks = unmask.propose, unmask.commit_blocks
            self._transfer = transfer.transfer
            if config.fused_ops:
                model.ops, self._products = ops.fused()
        else:
            self._propose, self._commit_blocks = unmasking.propose, unmasking.commit_blocks
        self.graphs: StepGraphs | None = None
        # SDPA's loop over sequences has other lengths in every batch, so no graph can hold it.
        if self.workspace is not None and config.cuda_graphs:
            if config.fused_ops and config.tuned_products:
                self._tune_products()
            self.graphs = StepGraphs(
                self.state,
                model.config.logit_shift,
                config,
                self._step,
                self._new_attention,
                self._tune_gated if config.fused_ops and config.tuned_products else None,
            )

    @property
    def logits_bytes(self) -> int:
        """The most that the logits of an iteration take."""
        rows = self.config.max_batch_size * self.config.block_length
        return rows * self.model.config.vocab_size * self.pool.element_size()

    @property
    def padding_share(self) -> float:
        """Share of the tokens replayed in CUDA graphs that were padding."""
        if self.graphs is None or not self.graphs.replayed_tokens:
            return 0.0
        return round(self.graphs.padding_tokens / self.graphs.replayed_tokens, 4)

    @torch.inference_mode()
    def admit(self, request: Request) -> None:
        """Fills the slot of a request."""
        self.state.admit(request)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launch:
        """Starts an iteration; on a CPU it is over when this returns."""
        for request in plan.admitted:
            self.state.admit(request)
        size = self.graphs.find(plan.rows) if self.graphs else None
        inputs_on_host = None
        if self.graphs and size:
            blocks, inputs_on_host = self.graphs.replay(plan.rows, size)
        else:
            batch = HostBatch(plan.rows, self.state, self.model.config.logit_shift)
            inputs = StepInputs.view(to_device(batch.packed, self.device), batch.layout)
            self.attention.plan(batch, inputs)
            blocks = self._step(inputs, self.attention)
        if self.device.type == "cpu":
            return Launch(plan, blocks, None)
        on_host = torch.empty(blocks.shape, dtype=blocks.dtype, pin_memory=True)
        self._transfer(blocks, on_host)
        done = torch.cuda.Event()
        done.record()
        return Launch(plan, on_host, done, inputs_on_host)

    def _step(self, inputs: StepInputs, attention: PagedAttention) -> Tensor:
        """Forward, unmask and commit; the blocks' tokens [rows, longest block] after it."""
        config, state = self.model.config, self.state
        ids = state.tokens[inputs.token_slots, inputs.positions]
        hidden = self.model.forward(ids, attention)
        logits = self.model.logits(hidden[inputs.logit_rows])
        sampling = state.sampling_rows(inputs.slots)
        proposed, confidence = self._propose(
            logits.view(*inputs.block_positions.shape, -1),
            inputs.block_positions,
            inputs.commit.forward,
            sampling,
            config.family,
            config.mask_token_id,
            self.stop_token_ids,
        )
        return self._commit_blocks(
            state.tokens,
            inputs.slots,
            inputs.block_positions,
            inputs.block_lengths,
            proposed,
            confidence,
            inputs.commit,
            sampling,
            config.mask_token_id,
        )

    def _tune_products(self) -> None:
        """For the numbers of rows that graphs have."""
        model = self.model
        layers = model.layers[:TUNED_LAYERS]
        sizes = graph_sizes(self.config.max_batch_size, self.config.block_length)
        self._products.tune(
            [
                [(layer.qkv, layer.qkv_bias) for layer in layers],
                [(layer.output, None) for layer in layers],
                [(layer.gate_up, None) for layer in layers],
                [(layer.down, None) for layer in layers],
                [(model.head, None)],
            ],
            sorted({size.tokens for size in sizes}),
        )

    def _tune_gated(self, rows: int, measure_step: Callable[[], float]) -> None:
        self._products.tune_gated(rows, self.model.layers[0].gate_up, measure_step)

    def _new_attention(self, size: GraphSize | None) -> PagedAttention:
        if self.workspace is None:
            return SdpaAttention(self.model, self.pool, self.state)
        from sangam_backend.flashinfer_attention import FlashInferAttention

        return FlashInferAttention(
            self.model,
            self.pool,
            self.state,
            self.workspace,
            size,
            self.config.block_length,
        )


def new_workspace(config: EngineConfig, device: torch.device) -> Tensor | None:
    """FlashInfer's scratch memory, shared by all its wrappers; None where SDPA attends."""
    if device.type == "cpu" or config.attention == "sdpa":
        return None
    if importlib.util.find_spec("flashinfer") is None:
        raise ConfigError(
            "attention on CUDA needs FlashInfer: pip install 'sangam[cuda]', "
            "or set attention to sdpa"
        )
    from sangam_backend.flashinfer_attention import WORKSPACE_BYTES

    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
