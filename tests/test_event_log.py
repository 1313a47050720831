"""Rows go to files in bulk, and a disk that takes no more stops the log alone."""

from __future__ import annotations

import csv
import logging
import resource
from pathlib import Path

import pytest

from sangam_backend.config import ConfigError
from sangam_backend.event_log import EventLog, IterationRow, open_event_log
from sangam_backend.trace_context import trace_id_of

ROW = IterationRow(1.5, "mixed", 1, 2, 3, 100, 7, 4, 5, 60, 0.25)
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
FILE_LIMIT = 8192


def test_rows_are_written(tmp_path: Path) -> None:
    log = open_event_log(str(tmp_path / "new"), "sangam_0_0", "colocated")
    assert log is not None
    log.add(ROW)
    log.close()
    (path,) = (tmp_path / "new").glob("sangam_0_0.colocated.*.iterations.csv")
    with path.open(newline="") as file:
        assert list(csv.reader(file)) == [list(IterationRow._fields), [str(v) for v in ROW]]


def test_no_directory_no_log() -> None:
    assert open_event_log("", "sangam_0_0", "colocated") is None


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"event_log is '.*/file/below'"):
        EventLog(tmp_path / "file" / "below", "name")


def test_a_full_disk_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = EventLog(tmp_path, "name")
    for _ in range(1000):
        log.add(ROW)
    with caplog.at_level(logging.ERROR, "sangam"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, hard))
        try:
            log.close()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        log.add(ROW)
    (message,) = (record.getMessage() for record in caplog.records)
    assert "cannot be written" in message
    assert (tmp_path / "name.iterations.csv").stat().st_size <= FILE_LIMIT


@pytest.mark.parametrize("header", [f"00-{TRACE}-{PARENT}-01", f"01-{TRACE}-{PARENT}-00-more"])
def test_trace_id(header: str) -> None:
    assert trace_id_of(header) == TRACE


@pytest.mark.parametrize(
    "header",
    [
        None,
        7,
        "",
        f"00-{TRACE}-{PARENT}",
        f"00-{TRACE}-{PARENT}-01-more",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{PARENT}-01\n",
    ],
)
def test_a_malformed_header_counts_as_none(header: object) -> None:
    assert trace_id_of(header) == ""
