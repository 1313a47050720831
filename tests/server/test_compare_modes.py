"""Every mode under the same loads, as perf/compare_modes.py measures them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import compare_modes
import pytest
from server.harness import ROOT, TINY


@pytest.mark.parametrize(
    ("mode", "gpus", "expected"),
    [
        ("colocated", "", ["--instances=1"]),
        ("colocated", "0,1", ["--instances=2", "--gpus=0,1"]),
        ("disaggregated", "", ["--prefill-instances=1", "--decode-instances=1"]),
        (
            "disaggregated",
            "0",
            [
                "--prefill-instances=1", "--decode-instances=1",
                "--prefill-gpus=0", "--decode-gpus=0",
            ],
        ),
        (
            "hybrid",
            "0,1,2",
            [
                "--prefill-instances=1", "--decode-instances=2",
                "--prefill-gpus=0", "--decode-gpus=1,2", "--prefill-overflow-tokens=9",
            ],
        ),
    ],
)  # fmt: skip
def test_options(mode: str, gpus: str, expected: list[str]) -> None:
    named = gpus.split(",") if gpus else []
    assert compare_modes.mode_options(mode, named, 9) == [f"--mode={mode}", *expected]


def test_modes_under_the_same_loads(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "perf" / "compare_modes.py"), "--model", str(TINY)]
    command += ["--requests=8", "--rates", "--mixed-rates=8", "--prompt-tokens=20"]
    command += ["--long-prompt-tokens=400", "--output-tokens=32", "--output", str(tmp_path)]
    command += [
        "--modes",
        "colocated",
        "hybrid",
        "--serve=--kv-cache-tokens 8192",
        "--prefill-overflow-tokens=100",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("8 of 8 answers") == 2
    results = json.loads((tmp_path / "modes.json").read_text())
    loads = {mode: result["loads"] for mode, result in results.items()}
    assert all(row["failed"] == 0 for rows in loads.values() for row in rows.values())
    assert [rows["burst"]["overflows"] > 0 for rows in loads.values()] == [False, True]
    assert [rows["burst"]["pulled bytes"] > 0 for rows in loads.values()] == [False, True]
    assert "p99" in loads["hybrid"]["8 requests/s, some long"]["short requests"]
