"""The unmasking kernels against their torch twins; under Triton's interpreter without a GPU."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from sangam_backend import unmasking
from sangam_backend.config import Family
from sangam_backend.kernels import unmask
from sangam_backend.rules import Count
from sangam_backend.unmasking import CommitRows, SamplingRows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MASK, STOPS = 7, (3, 11)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unmask, "CHUNK", 512)


def sampling_rows(rows: int, generator: torch.Generator) -> SamplingRows:
    """Every combination of measures, temperatures and filters, row after row."""
    kinds = itertools.product(range(4), (0.0, 0.7), (1.0, 0.6), (0, 5))
    chosen = list(itertools.islice(itertools.cycle(kinds), rows))
    measures, temperatures, top_ps, top_ks = (torch.tensor(column) for column in zip(*chosen))
    return SamplingRows(
        temperature=temperatures.float().to(DEVICE),
        top_p=top_ps.float().to(DEVICE),
        top_k=top_ks.to(DEVICE),
        seed=torch.randint(0, 2**62, (rows,), generator=generator).to(DEVICE),
        confidence=measures.to(DEVICE),
        min_position=torch.randint(0, 40, (rows,), generator=generator).to(DEVICE),
    )


def spread_logits(rows: int, block: int, vocab: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Logits of which no two of a position are equal, so that orders are unambiguous."""
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.argsort(torch.rand(rows, block, vocab, generator=generator), dim=-1)
    grid = torch.arange(vocab, dtype=torch.int32)
    # Consecutive bf16 values from 1 on, mirrored: exact in every dtype.
    bits = (0x3F80 + grid % 400).to(torch.int16)
    values = bits.view(torch.bfloat16).float() * torch.where(grid < 400, 1.0, -1.0)
    assert len(values.unique()) == vocab
    return values[ranks].to(dtype).to(DEVICE)


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stops", [(), STOPS])
def test_propose(family: Family, dtype: torch.dtype, stops: tuple[int, ...]) -> None:
    rows, block, vocab = 32, 1, 787
    generator = torch.Generator().manual_seed(rows)
    sampling = sampling_rows(rows, generator)
    logits = spread_logits(rows, block, vocab, dtype, seed=len(stops))
    positions = torch.randint(0, 50, (rows, block), generator=generator).to(DEVICE)
    forward = torch.randint(0, 1 << 20, (rows,), generator=generator).to(DEVICE)
    stop_ids = torch.tensor(stops, dtype=torch.int64, device=DEVICE)
    before = logits.clone()
    arguments = (positions, forward, sampling, family, MASK, stop_ids)
    tokens, confidences = unmask.propose(logits, *arguments)
    expected_tokens, expected = unmasking.propose(logits.clone(), *arguments)
    assert torch.equal(logits, before)
    assert torch.equal(tokens, expected_tokens)
    assert torch.allclose(confidences.double(), expected.double(), atol=2e-6, rtol=2e-5)


def test_each_position_takes_the_parameters_of_its_row() -> None:
    rows, block, vocab = 3, 5, 1100
    generator = torch.Generator().manual_seed(0)
    plain = sampling_rows(rows, generator)
    sampling = plain._replace(
        temperature=torch.tensor([0.0, 1.0, 0.3], device=DEVICE),
        top_p=torch.ones(rows, device=DEVICE),
        top_k=torch.zeros_like(plain.top_k),
        confidence=torch.tensor([0, 3, 0], device=DEVICE),
    )
    logits = torch.randn(rows, block, vocab, generator=generator).to(DEVICE)
    positions = torch.randint(0, 50, (rows, block), generator=generator).to(DEVICE)
    forward = torch.arange(rows, device=DEVICE)
    stops = torch.tensor(STOPS, device=DEVICE)
    arguments = (positions, forward, sampling, "llada", MASK, stops)
    tokens, confidences = unmask.propose(logits, *arguments)  # type: ignore[arg-type]
    expected_tokens, expected = unmasking.propose(logits.clone(), *arguments)  # type: ignore[arg-type]
    assert torch.equal(tokens, expected_tokens)
    assert torch.allclose(confidences.double(), expected.double(), atol=2e-6, rtol=2e-5)


def test_ties_go_to_the_first_token() -> None:
    logits = torch.zeros(1, 2, 1500, device=DEVICE)
    logits[0, 1, [700, 1300]] = 1.0
    sampling = sampling_rows(1, torch.Generator())
    positions = torch.tensor([[50, 51]], device=DEVICE)
    forward = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    stops = torch.tensor([0], device=DEVICE)
    tokens, _ = unmask.propose(logits, positions, forward, sampling, "llada", 1, stops)
    assert tokens.tolist() == [[0, 700]]


@pytest.mark.parametrize("block", [1, 3, 8, 32])
def test_commit_blocks(block: int) -> None:
    rules = [(rule, value) for rule in Count for value in (0.0, 0.4, 0.95, 2.0)]
    rows = len(rules)
    generator = torch.Generator().manual_seed(block)
    table = torch.randint(8, 90, (rows + 3, 64), generator=generator)
    slots = torch.randperm(rows + 3, generator=generator)[:rows]
    lengths = torch.randint(1, block + 1, (rows,), generator=generator)
    starts = torch.randint(0, 20, (rows, 1), generator=generator)
    positions = starts + torch.minimum(torch.arange(block), lengths[:, None] - 1)
    masked = torch.rand(rows, block, generator=generator) < 0.7
    table[slots[:, None], positions] = torch.where(masked, MASK, 5)
    # Few distinct confidences, so that there are ties.
    confidences = torch.randint(0, 11, (rows, block), generator=generator) / 10
    proposed = torch.randint(100, 200, (rows, block), generator=generator)
    commit = CommitRows(
        rule=torch.tensor([int(rule) for rule, _ in rules]),
        value=torch.tensor([value for _, value in rules]),
        forward=torch.randint(0, 99, (rows,), generator=generator),
    )
    expected_table = table.clone()
    sampling = sampling_rows(rows, generator)
    on_cpu = SamplingRows(*(column.cpu() for column in sampling))
    expected = unmasking.commit_blocks(
        expected_table, slots, positions, lengths, proposed, confidences, commit, on_cpu, MASK
    )
    table = table.to(DEVICE)
    blocks = unmask.commit_blocks(
        table,
        slots.to(DEVICE),
        positions.to(DEVICE),
        lengths.to(DEVICE),
        proposed.to(DEVICE),
        confidences.to(DEVICE),
        CommitRows(*(column.to(DEVICE) for column in commit)),
        sampling,
        MASK,
    )
    assert torch.equal(blocks.cpu(), expected)
    assert torch.equal(table.cpu(), expected_table)


def test_a_row_of_length_0_writes_nothing() -> None:
    table = torch.full((1, 8), MASK, device=DEVICE)
    before = table.clone()
    zeros = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    cells = torch.arange(4, device=DEVICE)[None]
    commit = CommitRows(zeros + int(Count.QUOTA), zeros.float() + 4, zeros)
    sampling = sampling_rows(1, torch.Generator())
    unmask.commit_blocks(
        table, zeros, cells, zeros, cells + 100, cells.float(), commit, sampling, MASK
    )
    assert torch.equal(table, before)
