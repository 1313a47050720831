"""The search for the capacity on the real server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from server.harness import ROOT, TINY


def run(settings: dict[str, Any], folder: Path) -> list[str]:
    """The lines that the script prints."""
    source = folder / "search.yaml"
    source.write_text(json.dumps(settings))  # JSON is YAML
    command = [sys.executable, str(ROOT / "perf" / "capacity_search.py"), str(source)]
    command += ["--output", str(folder / "capacity")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_search(tmp_path: Path) -> None:
    generous = {"metric": "latency", "quantile": 0.9, "seconds": 60}
    impossible = {"metric": "first text", "quantile": 0.5, "seconds": 0.0001}
    common = {
        "model": str(TINY), "seconds": 2, "attempts": 1, "rates": [1, 3], "prompt_lengths": "8",
        "output_lengths": "32", "sampling": {"ignore_eos": True},
    }  # fmt: skip
    settings: dict[str, Any] = {
        "common": common,
        "configurations": {"generous": {"rules": [generous]}},
    }
    *trials, _, row = run(settings, tmp_path)
    assert len(trials) == 2
    assert row.split()[:3] == ["generous", "3", "nan"]
    kept = sorted((tmp_path / "capacity" / "trials").iterdir())
    summaries = [json.loads(path.read_text())["summary"] for path in kept]
    assert [(each["requests"], each["failed"]) for each in summaries] == [(2, 0), (6, 0)]

    # Other rules and another run use the trials kept: no server starts for them.
    settings["configurations"]["impossible"] = {"rules": [impossible]}
    log = tmp_path / "capacity" / "generous.log"
    log.unlink()
    *trials, _, generous_row, row = run(settings, tmp_path)
    assert len(trials) == 4
    assert (generous_row.split()[1], row.split()[1]) == ("3", "0")
    assert sorted((tmp_path / "capacity" / "trials").iterdir()) == kept
    assert not list((tmp_path / "capacity").glob("*.log"))
    assert (tmp_path / "capacity" / "latency.svg").stat().st_size > 10_000
    assert "impossible" in (tmp_path / "capacity" / "table.txt").read_text()


def test_a_load_that_the_server_refuses_is_no_trial(tmp_path: Path) -> None:
    rule = {"metric": "latency", "quantile": 0.9, "seconds": 60}
    settings = {"model": str(TINY), "rules": [rule], "sampling": {"unmasking": "never"}}
    source = tmp_path / "search.yaml"
    source.write_text(json.dumps({"common": settings, "configurations": {"wrong": {}}}))
    command = [sys.executable, str(ROOT / "perf" / "capacity_search.py"), str(source)]
    command += ["--output", str(tmp_path / "capacity")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "wrong: the warm-up failed: [INVALID_ARG] unmasking is 'never'" in done.stderr
    assert not (tmp_path / "capacity" / "trials").exists()
