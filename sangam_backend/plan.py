"""What the scheduler tells the runner of one iteration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from sangam_backend.config import Cache
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
    cache: Cache = "dual"

    @property
    def query_start(self) -> int:
        """The first position that the forward runs on."""
        return 0 if self.prefill or self.cache == "none" else self.block_start

    @property
    def num_tokens(self) -> int:
        if self.cache == "dual" and not self.prefill:
            return self.block_length
        return self.sequence_length - self.query_start


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One iteration: prefills first, then decodes, packed without padding."""

    rows: list[Row]
    admitted: list[Request]
    """Requests whose slots the runner must fill before the forward."""
    pulls: list[Request] = field(default_factory=list)
    """Requests that have got pages to pull their K/V into."""

    @property
    def foreseen(self) -> bool:
        """Whether the host knows which blocks the iteration finishes before it has run."""
        return all(row.commit.foresee(1) is not None for row in self.rows)

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)
