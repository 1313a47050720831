"""NVIDIA's load generators: perf_analyzer itself, and what genai-perf sends."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from server.harness import ROOT, TINY, Serving

PERF_ANALYZER = os.environ.get("PERF_ANALYZER") or shutil.which("perf_analyzer")
PROMPT = "Add 4363 and 75."


@pytest.mark.skipif(PERF_ANALYZER is None, reason="neither PERF_ANALYZER nor perf_analyzer on PATH")
def test_perf_analyzer(server: Serving, tmp_path: Path) -> None:
    data = {"data": [{"text_input": [PROMPT], "stream": [True], "max_tokens": [12]}]}
    (tmp_path / "input.json").write_text(json.dumps(data))
    options = "-m sangam -i grpc --async --streaming --request-count 40 --concurrency-range 4"
    done = subprocess.run(
        [
            str(PERF_ANALYZER),
            *options.split(),
            *("-u", server.grpc_url),
            *("--input-data", str(tmp_path / "input.json")),
            *("--profile-export-file", str(tmp_path / "profile.json")),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    throughput = re.search(r"Throughput: ([\d.]+) infer/sec", done.stdout)
    assert throughput is not None, done.stdout
    assert float(throughput[1]) > 0
    (experiment,) = json.loads((tmp_path / "profile.json").read_text())["experiments"]
    assert len(experiment["requests"]) >= 40
    assert all(request["response_timestamps"] for request in experiment["requests"])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "payload",
    [
        {"sampling_parameters": '{"max_tokens": "12", "min_tokens": "12"}'},
        {"max_tokens": 12, "min_length": 12},
    ],
    ids=["vllm", "tensorrtllm"],
)
def test_genai_perf_payloads(server: Serving, payload: dict[str, Any], stream: bool) -> None:
    options = {"text_input": PROMPT, "exclude_input_in_output": True, "stream": stream}
    answer = server.ask({**options, **payload, "return_finish_reason": True})
    assert (answer.error, answer.finals) == (None, 1)
    assert (len(answer.ids), answer.finish_reason) == (12, "length")
    assert PROMPT not in answer.text


@pytest.mark.skipif(PERF_ANALYZER is None, reason="neither PERF_ANALYZER nor perf_analyzer on PATH")
def test_the_script_measures_every_input(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "perf" / "perf_analyzer" / "run.py"), f"--model={TINY}"]
    command += ["--modes=colocated", "--concurrencies=2", "--requests=4", f"--output={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    _, *rows = done.stdout.splitlines()
    assert [row.split()[:3] for row in rows] == [
        ["colocated", name, "2"] for name in ("chat", "text", "token_ids")
    ]
