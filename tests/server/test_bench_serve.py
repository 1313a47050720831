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
    lines.insert(0, {"arrival": 0.0, "prompt_tokens": 9, "max_tokens": 9999})
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, str(ROOT / "perf" / "bench_serve.py"), "--url", server.grpc_url]
    command += ["--trace", str(trace), "--output", str(tmp_path / "load"), "--warm-up", "2"]
    command += ["--sampling", json.dumps(SAMPLING), "--sla", "latency=60", "first_text=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "load" / "summary.json").read_text())
    assert (summary["requests"], summary["failed"]) == (12, 1)
    for failures in (summary["failures"], summary["warm-up failures"]):
        ((message, count),) = failures.items()
        assert ("max_tokens is 9999" in message, count) == (True, 1)
    assert summary["goodput requests/s"] == 0
    with (tmp_path / "load" / "requests.csv").open() as file:
        rows = list(csv.DictReader(file))
    refused = rows.pop(0)
    assert (refused["error"], refused["output_tokens"]) == (message, "0")
    # In the order of arrival, the chat among the others.
    lengths = [line["max_tokens"] for line in sorted(lines[1:], key=lambda line: line["arrival"])]
    assert [int(row["output_tokens"]) for row in rows] == lengths
    assert all(0 < float(row["first_text"]) <= float(row["latency"]) for row in rows)
    forwards = [int(row["forwards"]) for row in rows]
    assert all(length / 4 <= count <= 8 for length, count in zip(lengths, forwards))
    assert summary["output tokens/forward"] == round(sum(lengths) / sum(forwards), 2)
    assert (tmp_path / "load" / "latency.svg").stat().st_size > 5000
