"""Packed batches: every token finds its place, and padding touches nothing else."""

from __future__ import annotations

import random

import torch

from sangam_backend.buffers import DeviceState, HostBatch, StepInputs
from sangam_backend.graphs import GraphSize, graph_sizes
from sangam_backend.plan import Row
from sangam_backend.request import Request
from sangam_backend.rules import Commit, Count

CPU = torch.device("cpu")
BLOCK = 8


def make_row(slot: int, prefill: bool, start: int, length: int, block_length: int = BLOCK) -> Row:
    request = Request.__new__(Request)
    request.pages = list(range(10 * slot, 10 * slot + 10))
    commit = Commit(Count.QUOTA, 2.0)
    return Row(request, slot, prefill, 0, start, block_length, length, 5, commit)


def make_inputs(batch: HostBatch) -> StepInputs:
    return StepInputs.view(torch.from_numpy(batch.packed), batch.layout)


def test_a_ragged_batch_is_packed_without_padding() -> None:
    state = DeviceState(4, 128, [90], CPU)
    rows = [make_row(2, True, 16, 32), make_row(0, False, 40, 64, 4), make_row(1, False, 8, 24)]
    for shift in (0, 1):
        inputs = make_inputs(HostBatch(rows, state, shift))
        expected = [*range(32), *range(40, 44), *range(8, 16)]
        assert inputs.positions.tolist() == expected
        assert inputs.token_slots.tolist() == [2] * 32 + [0] * 4 + [1] * 8
        assert inputs.block_positions.tolist() == [
            list(range(16, 24)),
            [40, 41, 42, 43, 43, 43, 43, 43],
            list(range(8, 16)),
        ]
        logit_rows = inputs.logit_rows.view(3, BLOCK)
        assert logit_rows[0].tolist() == [p - shift for p in range(16, 24)]
        first = [32 + max(i - shift, 0) for i in range(4)]
        assert logit_rows[1].tolist() == first + [first[-1]] * 4
        assert logit_rows[2].tolist() == [36 + max(i - shift, 0) for i in range(8)]


def test_padding_stays_in_its_slot_and_pages() -> None:
    rng = random.Random(0)
    state = DeviceState(9, 128, [90], CPU)
    for size in graph_sizes(9, BLOCK):
        if size.tokens > 512:
            continue
        rows = fill(size, rng)
        spare = size.tokens - sum(row.num_tokens for row in rows)
        missing = size.rows - len(rows)
        padding = [spare] + [0] * (missing - 1) if size.prefill else [BLOCK] * missing
        batch = HostBatch(rows, state, 1, padding, BLOCK)
        inputs = make_inputs(batch)
        assert (batch.layout.num_tokens, batch.layout.num_rows) == (size.tokens, size.rows)
        padded = inputs.token_slots == state.padding_slot
        assert int(padded.sum()) == spare
        assert not padded.any() or int(inputs.positions[padded].max()) < BLOCK
        assert int(inputs.logit_rows.max()) < size.tokens
        assert inputs.commit.value[len(rows) :].tolist() == [0.0] * missing
        bounds, last = batch.page_bounds()
        assert len(bounds) == size.rows + 1
        assert (last > 0).all()


def fill(size: GraphSize, rng: random.Random) -> list[Row]:
    """Rows that leave a graph of the size one row short, or as many as a decode needs."""
    count = rng.randint(1, size.rows - 1) if size.prefill else rng.randint(1, size.rows)
    decodes = count - 1 if size.prefill else count
    rows = [make_row(slot, False, 16, 32) for slot in range(decodes)]
    if size.prefill:
        length = size.tokens - BLOCK * decodes - rng.randint(0, 3)
        rows.insert(0, make_row(decodes, True, 0, min(length, 160)))
    return [row for row in rows if row.num_tokens > 0]
