"""The load generator against the real server."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from server.harness import ROOT, Serving

SAMPLING = {"ignore_eos": True, "unmasking": "quota", "tokens_per_step": 4}


def test_a_load_is_counted_right(server: Serving, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Repeat: the cat sat"}]
    lines: list[dict[str, Any]] = [
        {"arrival": 0.05 * n, "prompt_tokens": 9, "max_tokens": 20 + n} for n in range(10)
    ]
    lines.append({"arrival": 0.2, "messages": messages, "max_tokens": 32})
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, str(ROOT / "perf" / "bench_serve.py"), "--url", server.grpc_url]
    command += ["--trace", str(trace), "--output", str(tmp_path / "load"), "--warm-up", "2"]
    command += ["--sampling", json.dumps(SAMPLING), "--sla", "latency=60", "first_text=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "load" / "summary.json").read_text())
    assert (summary["requests"], summary["failed"]) == (11, 0)
    assert summary["goodput requests/s"] == 0
    with (tmp_path / "load" / "requests.csv").open() as file:
        rows = list(csv.DictReader(file))
    # In the order of arrival, the chat among the others.
    lengths = [line["max_tokens"] for line in sorted(lines, key=lambda line: line["arrival"])]
    assert [int(row["output_tokens"]) for row in rows] == lengths
    assert all(0 < float(row["first_text"]) <= float(row["latency"]) for row in rows)
    assert (tmp_path / "load" / "latency.svg").stat().st_size > 5000
