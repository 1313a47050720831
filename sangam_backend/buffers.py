"""What the device knows of each admitted request, and the packed inputs of an iteration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sangam_backend.pages import PAGE_SIZE
from sangam_backend.plan import Row
from sangam_backend.request import Request
from sangam_backend.rules import Count
from sangam_backend.unmasking import MEASURES, CommitRows, SamplingRows

Ints = NDArray[np.int64]


class DeviceState:
    """Tokens, pages and sampling parameters by slot.

    The last slot belongs to no request: padding rows of a CUDA graph read and write it, and the
    pages behind the pool's own.
    """

    def __init__(
        self,
        num_slots: int,
        max_sequence_length: int,
        padding_pages: Sequence[int],
        device: torch.device,
    ) -> None:
        # Float64 where it costs nothing: the reference divides by a float64 temperature.
        real = torch.float64 if device.type == "cpu" else torch.float32

        def table(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(num_slots + 1, *shape, dtype=dtype, device=device)

        self.padding_slot = num_slots
        self.padding_pages = np.array(padding_pages, dtype=np.int32)
        self.tokens = table(max_sequence_length)
        self.page_table = table(-(-max_sequence_length // PAGE_SIZE), dtype=torch.int32)
        self.sampling = SamplingRows(
            temperature=table(dtype=real),
            top_p=table(dtype=real),
            top_k=table(),
            seed=table(),
            confidence=table(),
            min_position=table(),
        )
        self.sampling.top_p.fill_(1.0)
        self._set_pages(self.padding_slot, self.padding_pages)

    def admit(self, request: Request) -> None:
        """Fills the slot of a request: its prompt, then masks."""
        params, slot = request.params, request.slot
        ids = np.array(request.prompt + request.canvas)
        self.tokens[slot, : len(ids)] = to_device(ids, self.tokens.device)
        self._set_pages(slot, np.array(request.pages, dtype=np.int32))
        rows = self.sampling
        rows.temperature[slot] = params.temperature
        rows.top_p[slot] = params.top_p
        rows.top_k[slot] = params.top_k
        rows.seed[slot] = params.seed
        rows.confidence[slot] = MEASURES.index(params.confidence)
        rows.min_position[slot] = len(request.prompt) + params.min_tokens

    def sampling_rows(self, slots: Tensor) -> SamplingRows:
        return SamplingRows(*(column[slots] for column in self.sampling))

    def _set_pages(self, slot: int, pages: NDArray[np.int32]) -> None:
        self.page_table[slot, : len(pages)] = to_device(pages, self.page_table.device)


class Layout(NamedTuple):
    """Sizes of a packed batch."""

    num_tokens: int
    num_rows: int
    block_length: int
    """Of the longest block."""

    @property
    def sizes(self) -> list[int]:
        blocks = self.num_rows * self.block_length
        return [self.num_tokens, self.num_tokens, blocks, blocks] + [self.num_rows] * 5


class StepInputs(NamedTuple):
    """What an iteration needs on the device besides the tables."""

    positions: Tensor
    """[tokens]"""
    token_slots: Tensor
    """[tokens]"""
    logit_rows: Tensor
    """[rows * block]: the packed tokens whose logits predict the positions of the blocks"""
    block_positions: Tensor
    """[rows, block]; columns past a row's block repeat its last position"""
    slots: Tensor
    """[rows]"""
    block_lengths: Tensor
    """[rows]"""
    commit: CommitRows

    @classmethod
    def view(cls, packed: Tensor, layout: Layout) -> StepInputs:
        """Reads a flat buffer of int64 that holds the fields one after the other."""
        parts = packed.split(layout.sizes)
        return cls(
            positions=parts[0],
            token_slots=parts[1],
            logit_rows=parts[2],
            block_positions=parts[3].view(layout.num_rows, layout.block_length),
            slots=parts[4],
            block_lengths=parts[5],
            commit=CommitRows(rule=parts[6], value=parts[8].view(torch.float64), forward=parts[7]),
        )


class HostBatch:
    """The packed inputs of an iteration, as the host builds them."""

    def __init__(
        self,
        rows: list[Row],
        state: DeviceState,
        logit_shift: int,
        padding: Sequence[int] = (),
        padding_length: int = 0,
    ) -> None:
        """After the rows come ones that commit nothing, with so many queries as `padding` says.

        Their sequence is the padding slot's one block, of `padding_length`.
        """
        num_padding = len(padding)
        num_tokens = sum(row.num_tokens for row in rows)

        def column(values: list[int], padding: int) -> Ints:
            return np.array(values + [padding] * num_padding, dtype=np.int64)

        self.queries = np.array([row.num_tokens for row in rows] + list(padding), dtype=np.int64)
        self.sequences = column([row.sequence_length for row in rows], padding_length)
        self.query_starts = column([row.query_start for row in rows], 0)
        self.slots = column([row.slot for row in rows], state.padding_slot)
        starts = column([row.block_start for row in rows], 0)
        lengths = column([row.block_length for row in rows], padding_length)
        self.ends = np.cumsum(self.queries)
        self.layout = Layout(int(self.ends[-1]), len(rows) + num_padding, int(lengths.max()))

        packed_starts = self.ends - self.queries
        offsets = np.minimum(np.arange(self.layout.block_length), lengths[:, None] - 1)
        positions = starts[:, None] + offsets
        # A decode of a shifted model lacks the row before its block: the block's first position,
        # which its prefill has committed, takes the block's first row instead.
        predicted_by = np.maximum(positions - self.query_starts[:, None] - logit_shift, 0)
        logit_rows = np.minimum(packed_starts[:, None] + predicted_by, self.layout.num_tokens - 1)
        token_positions = np.arange(self.layout.num_tokens) - np.repeat(
            packed_starts - self.query_starts, self.queries
        )
        if num_padding:
            token_positions[num_tokens:] %= padding_length
        values = [row.commit.value for row in rows] + [0.0] * num_padding
        self.packed = np.concatenate(
            [
                token_positions,
                np.repeat(self.slots, self.queries),
                logit_rows.ravel(),
                positions.ravel(),
                self.slots,
                lengths,
                column([row.commit.rule for row in rows], Count.QUOTA),
                column([row.forward for row in rows], 0),
                np.array(values, dtype=np.float64).view(np.int64),
            ]
        )
        pages = [np.array(row.request.pages, dtype=np.int32) for row in rows]
        self.pages = pages + [state.padding_pages] * num_padding

    def used_pages(self) -> list[NDArray[np.int32]]:
        """Of each row the pages that hold its sequence."""
        counts = -(-self.sequences // PAGE_SIZE)
        return [pages[:count] for pages, count in zip(self.pages, counts)]

    def page_bounds(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Bounds [rows + 1] of the rows' pages when packed, and tokens in each last page."""
        counts = -(-self.sequences // PAGE_SIZE)
        bounds = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        return bounds, (self.sequences - (counts - 1) * PAGE_SIZE).astype(np.int32)


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copies through pinned memory, so that the host does not wait."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
