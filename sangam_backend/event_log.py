"""What an engine did, row by row, in CSV files: one of its iterations, one of its requests."""

from __future__ import annotations

import csv
import logging
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple, TextIO

from sangam_backend.config import ConfigError

WRITE_SECONDS = 0.5
MAX_ROWS = 100_000
"""Rows that wait for the disk; what comes beyond them is dropped."""

log = logging.getLogger("sangam")


class IterationRow(NamedTuple):
    """An iteration as it was launched. Times are seconds since the epoch."""

    time: float
    kind: str
    """prefill, decode or mixed."""
    prefills: int
    decodes: int
    batch_size: int
    tokens: int
    deficit: int
    """Tokens carried over to the next iteration."""
    waiting: int
    """Requests that wait for a prefill, or for pages to pull K/V into."""
    active: int
    """Requests whose block is decoded or pulled here."""
    kv_pages: int
    seconds: float = 0.0
    """From the launch to the result; iterations may overlap."""


class RequestRow(NamedTuple):
    """A request that has ended; of a decode instance, a block. Unknown values are None."""

    request_id: str
    trace_id: str
    block: int | None
    """Index of the block, of a decode instance."""
    arrival: float
    queue_seconds: float | None
    """From the arrival to the first forward in this engine."""
    prompt_tokens: int | None
    generated_tokens: int
    """Committed from the left; of a decode instance, in the block."""
    forwards: int
    """Of an owner of requests, those of other engines for it too."""
    prefills: int
    first_text: float | None
    """When this instance first sent tokens of it."""
    end: float
    outcome: str
    """stop, length, an error's code, or of a decode instance block, when the request goes on."""


class EventLog:
    """Rows may come from any thread; a thread of its own writes them in bulk."""

    def __init__(self, directory: Path, name: str) -> None:
        """Makes <name>.iterations.csv and <name>.requests.csv.

        Raises:
            ConfigError: the directory cannot be written to.
        """
        kinds: dict[type[IterationRow] | type[RequestRow], str] = {
            IterationRow: "iterations",
            RequestRow: "requests",
        }
        self._rows: deque[IterationRow | RequestRow] = deque()
        self._files: dict[type, TextIO] = {}
        self._num_dropped = 0
        self._stopping = threading.Event()
        self._failed = False
        # Of time.monotonic, on which the engine's times are.
        self._epoch = time.time() - time.monotonic()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for kind, suffix in kinds.items():
                path = directory / f"{name}.{suffix}.csv"
                self._files[kind] = path.open("x", newline="")
                csv.writer(self._files[kind]).writerow(kind._fields)
        except OSError as error:
            raise ConfigError(f"event_log is {str(directory)!r}: {error}") from None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def add(self, row: IterationRow | RequestRow) -> None:
        if self._failed:
            return
        if len(self._rows) < MAX_ROWS:
            self._rows.append(row)
        else:
            self._num_dropped += 1

    def wall(self, moment: float) -> float:
        """Seconds since the epoch of a moment on the clock of time.monotonic."""
        return round(self._epoch + moment, 6)

    def close(self) -> None:
        """Writes what is left."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stopping.wait(WRITE_SECONDS):
                self._write()
            self._write()
            for file in self._files.values():
                file.close()
        except OSError as error:
            self._failed = True
            self._rows.clear()
            log.error("the event log ends here, it cannot be written: %s", error)
        if self._num_dropped:
            log.error("the event log lacks %d rows, the disk was too slow", self._num_dropped)

    def _write(self) -> None:
        rows = [self._rows.popleft() for _ in range(len(self._rows))]
        for kind, file in self._files.items():
            csv.writer(file).writerows(row for row in rows if isinstance(row, kind))
            file.flush()


def open_event_log(directory: str, instance: str, role: str) -> EventLog | None:
    """The log of an engine process, or None when no directory is named."""
    if not directory:
        return None
    started = time.strftime("%Y%m%dT%H%M%S")
    return EventLog(Path(directory), f"{instance}.{role}.{started}.{os.getpid()}")
