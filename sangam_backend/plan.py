"""What the scheduler tells the runner of one iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sangam_backend.request import Request
from sangam_backend.rules import Commit


class Row(NamedTuple):
    """One request's part of an iteration, as it stood when the iteration was planned."""

    request: Request
    slot: int
    prefill: bool
    block: int
    """Index of the block."""
    block_start: int
    """Position of the block in the sequence."""
    block_length: int
    sequence_length: int
    forward: int
    """Numbers the forward for its random draws."""
    commit: Commit

    @property
    def num_tokens(self) -> int:
        return self.sequence_length if self.prefill else self.block_length


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration: prefills first, then decodes, packed without padding."""

    rows: list[Row]
    admitted: list[Request]
    """Requests whose slots the runner must fill before the forward."""

    @property
    def foreseen(self) -> bool:
        """Whether the host knows which blocks the iteration finishes before it has run."""
        return all(row.commit.foresee(1) is not None for row in self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)
