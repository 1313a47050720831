"""Processes of this host, as /proc shows them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

FROZEN_SECONDS = 20.0
"""A process that has given no sign for so long is frozen: each gives one every second."""


@dataclass(frozen=True, slots=True)
class Process:
    """A process, told apart from later ones of the same number."""

    pid: int
    started: int
    """In clock ticks after boot."""

    @classmethod
    def current(cls) -> Process:
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Process:
        return cls(pid, _start_time(pid) or 0)

    def is_running(self) -> bool:
        return _start_time(self.pid) == self.started


def is_running(pid: int) -> bool:
    """False for one that has ended and is not yet waited for."""
    return _start_time(pid) is not None


def children(pid: int) -> list[int]:
    """Processes started by one; [] when it has ended."""
    try:
        lists = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    except FileNotFoundError:
        return []
    return [int(child) for text in lists for child in text.split()]


def _start_time(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] == "Z" else int(fields[19])
