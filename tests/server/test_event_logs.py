"""The event log of each mode says what the clients saw, under their trace ids."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from server.harness import EVERYTHING, ROOT, Answer, Serving, Stream, serving, wait_for

Rows = list[dict[str, str]]


def traceparent(trace: str) -> str:
    return f"00-{trace}-{'b' * 16}-01"


def ask(server: Serving, header: str) -> Answer:
    stream = Stream(server.grpc_url, {"traceparent": header})
    try:
        sampling = {"max_tokens": 64, "ignore_eos": True}
        inputs = {"input_ids": [5, 6, 7], "stream": True, "sampling_parameters": sampling}
        stream.send(inputs | EVERYTHING)
        return stream.receive()
    finally:
        stream.close()


def read(directory: Path, pattern: str) -> Rows:
    rows: Rows = []
    for path in directory.glob(pattern):
        with path.open(newline="") as file:
            rows += csv.DictReader(file)
    return rows


@pytest.mark.parametrize("mode", ["colocated", "disaggregated", "hybrid"])
def test_event_log(mode: str, tmp_path: Path) -> None:
    events = tmp_path / "events"
    owner = "colocated" if mode == "colocated" else "prefill"
    body = {"text_input": "Hi", "traceparent": traceparent("2" * 32)}
    with serving(tmp_path / "log", f"--mode={mode}", f"--event-log={events}") as server:
        answer = ask(server, traceparent("1" * 32))
        assert len(answer.ids) == 64, answer.error
        assert ask(server, "malformed").finals == 1
        model = "/v2/models/sangam/"
        streamed = body | {"stream": True, "max_tokens": 8}
        assert server.http(model + "generate_stream", streamed)[0] == 200
        assert server.http(model + "generate", body | {"max_tokens": -1})[0] == 400
        wait_for(lambda: len(read(events, f"*.{owner}.*.requests.csv")) == 4)
    requests = read(events, f"*.{owner}.*.requests.csv")
    traces = [row["trace_id"] for row in requests]
    assert sorted(traces) == ["", "1" * 32, "2" * 32, "2" * 32]
    first = requests[traces.index("1" * 32)]
    assert (first["outcome"], first["prompt_tokens"]) == ("length", "3")
    assert (first["generated_tokens"], first["prefills"]) == ("64", "2")
    assert float(first["queue_seconds"]) < float(first["end"]) - float(first["arrival"])
    assert requests[-1]["outcome"] == "invalid_arg"
    blocks = read(events, "*.decode.*.requests.csv")
    mine = [row for row in blocks if row["trace_id"] == "1" * 32]
    if mode == "colocated":
        assert float(first["arrival"]) < float(first["first_text"]) <= float(first["end"])
    else:
        assert [(row["block"], row["outcome"]) for row in mine] == [("0", "block"), ("1", "length")]
        assert sum(int(row["generated_tokens"]) for row in mine) == 64
    iterations = read(events, "*.iterations.csv")
    assert sum(int(row["prefills"]) for row in iterations) == sum(
        int(row["prefills"]) for row in requests + blocks
    )
    assert all(float(row["seconds"]) > 0 for row in iterations)
    assert max(int(row["kv_pages"]) for row in iterations) > 0
    draw(events, tmp_path / "timeline.svg")


def draw(events: Path, output: Path) -> None:
    command = [sys.executable, str(ROOT / "perf/timeline.py"), str(events), "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    engines = {path.name.split(".")[0] for path in events.iterdir()}
    assert len(done.stdout.splitlines()) == len(engines)
    assert output.stat().st_size > 10_000
