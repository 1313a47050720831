"""Runs one planned iteration on one device."""

from __future__ import annotations

import torch
from torch import Tensor

from sangam_backend.attention import PagedSdpaAttention, Span
from sangam_backend.buffers import DeviceState
from sangam_backend.models.transformer import Transformer
from sangam_backend.plan import Row, StepPlan
from sangam_backend.unmasking import CommitRows, commit_mask, propose


class Runner:
    """The model, the KV pool and the device tables of one instance."""

    def __init__(
        self,
        model: Transformer,
        attention: PagedSdpaAttention,
        num_slots: int,
    ) -> None:
        self.model = model
        self.attention = attention
        self.device = model.embedding.device
        config = model.config
        self.state = DeviceState(num_slots, config.max_sequence_length, self.device)
        self.stop_token_ids = torch.tensor(sorted(config.stop_token_ids), dtype=torch.int64).to(
            self.device
        )

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[list[int]]:
        """Runs the forward of all rows and commits what they unmask.

        Returns:
            For each row its block's tokens, with the mask id where nothing is committed yet.
        """
        for request in plan.admitted:
            self.state.admit(request)
        hidden = self._forward(plan.rows)
        blocks = self._unmask(plan.rows, hidden)
        return [block[: row.block_length] for row, block in zip(plan.rows, blocks.tolist())]

    def _forward(self, rows: list[Row]) -> Tensor:
        """Hidden states [tokens, hidden] of the rows, packed."""
        spans = [
            Span(
                pages=row.request.pages,
                query_start=0 if row.prefill else row.block_start,
                num_queries=row.num_tokens,
                sequence_length=row.sequence_length,
            )
            for row in rows
        ]
        self.attention.plan(spans)
        positions = torch.cat(
            [torch.arange(s.query_start, s.query_start + s.num_queries) for s in spans]
        ).to(self.device)
        slots = torch.tensor([row.slot for row in rows]).repeat_interleave(
            torch.tensor([row.num_tokens for row in rows])
        )
        ids = self.state.tokens[slots.to(self.device), positions]
        return self.model.forward(ids, positions, self.attention)

    def _unmask(self, rows: list[Row], hidden: Tensor) -> Tensor:
        """Commits tokens of each row's block and returns the blocks, [rows, longest block]."""
        config = self.model.config
        offsets = torch.arange(max(row.block_length for row in rows), device=self.device)
        starts = self._column([row.block_start for row in rows])
        lengths = self._column([row.block_length for row in rows])
        slots = self._column([row.slot for row in rows])
        positions = starts[:, None] + offsets.clamp(max=lengths[:, None] - 1)
        logits = self.model.logits(hidden[self._logit_rows(rows, positions).flatten()])
        forward = self._column([row.forward for row in rows])
        sampling = self.state.sampling_rows(slots)
        proposed, confidences = propose(
            logits.view(*positions.shape, -1),
            positions,
            forward,
            sampling,
            config.family,
            config.mask_token_id,
            self.stop_token_ids,
        )
        blocks = self.state.tokens[slots[:, None], positions]
        masked = (blocks == config.mask_token_id) & (offsets < lengths[:, None])
        commit = CommitRows(
            rule=self._column([int(row.commit.rule) for row in rows]),
            value=torch.tensor([row.commit.value for row in rows], device=self.device).double(),
            forward=forward,
        )
        chosen = commit_mask(confidences, masked, positions, commit, sampling)
        blocks = torch.where(chosen, proposed, blocks)
        # Columns past a row's block repeat its last position, so they must repeat its token too.
        blocks = blocks.gather(1, positions - starts[:, None])
        self.state.tokens[slots[:, None], positions] = blocks
        return blocks

    def _logit_rows(self, rows: list[Row], positions: Tensor) -> Tensor:
        """Rows of the packed batch whose logits predict the positions.

        A decode of a shifted model lacks the row before its block; the block's first position,
        which its prefill has committed, takes the block's first row instead.
        """
        firsts, row_start = [], 0
        for row in rows:
            firsts.append(row_start if row.prefill else row_start - row.block_start)
            row_start += row.num_tokens
        packed = self._column(firsts)[:, None] + positions - self.model.config.logit_shift
        return packed.clamp(min=0)

    def _column(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
