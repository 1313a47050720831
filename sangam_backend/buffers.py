"""What the device knows of each admitted request, by slot."""

from __future__ import annotations

import torch
from torch import Tensor

from sangam_backend.request import Request
from sangam_backend.unmasking import MEASURES, SamplingRows


class DeviceState:
    """Token table and sampling parameters by slot."""

    def __init__(self, num_slots: int, max_sequence_length: int, device: torch.device) -> None:
        def table(dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_slots, dtype=dtype, device=device)

        self.tokens = torch.zeros(num_slots, max_sequence_length, dtype=torch.int64, device=device)
        self.sampling = SamplingRows(
            temperature=table(torch.float64),
            top_p=table(torch.float64),
            top_k=table(torch.int64),
            seed=table(torch.int64),
            confidence=table(torch.int64),
            min_position=table(torch.int64),
        )

    def admit(self, request: Request) -> None:
        """Fills the slot of a request: its prompt, then masks."""
        params, slot = request.params, request.slot
        ids = torch.tensor(request.prompt + request.canvas)
        self.tokens[slot, : len(ids)] = ids.to(self.tokens.device)
        rows = self.sampling
        rows.temperature[slot] = params.temperature
        rows.top_p[slot] = params.top_p
        rows.top_k[slot] = params.top_k
        rows.seed[slot] = params.seed
        rows.confidence[slot] = MEASURES.index(params.confidence)
        rows.min_position[slot] = len(request.prompt) + params.min_tokens

    def sampling_rows(self, slots: Tensor) -> SamplingRows:
        return SamplingRows(*(column[slots] for column in self.sampling))
