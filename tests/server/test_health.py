"""`sangam health` on servers that are well, busy, ill and gone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from server.harness import Serving, Stream, run_sangam, serving, wait_for

LONG = {"unmasking": "quota", "ignore_eos": True, "max_tokens": 1024}


def check(server: Serving) -> tuple[int, str]:
    options = ("--url", server.grpc_url, "--metrics-url", server.metrics_url, "--deadline", "1")
    done = run_sangam("health", *options)
    return done.returncode, done.stdout


def test_health(tmp_path: Path) -> None:
    with serving(tmp_path / "log", "--max-batch-size", "1", "--backlog", "9") as server:
        status, text = check(server)
        assert (status, text[:18]) == (0, "well: answered in ")

        stream = Stream(server.grpc_url)
        stream.send({"input_ids": [1, 2, 3], "sampling_parameters": LONG})
        wait_for(lambda: server.gauges()["sangam_requests_decoding"] > 0)
        status, text = check(server)
        assert (status, text[:12]) == (0, "well: busy, ")

        (engine,) = server.engines()
        os.kill(engine, signal.SIGSTOP)
        status, text = check(server)
        assert (status, text[:16]) == (1, "ill: no answer: ")
        os.kill(engine, signal.SIGCONT)
        stream.close(cancel=True)
    status, text = check(server)
    assert (status, text[:16]) == (1, "ill: no answer: ")
