"""The Triton model on CUDA, through the real server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from server.harness import EVERYTHING, Answer, Serving, Stream, serving, wait_for

QUESTION = [{"role": "user", "content": "Add 4363 and 75."}]
STREAMS = 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    log = tmp_path_factory.mktemp("server") / "log"
    with serving(log, "--device", "cuda", "--kv-cache-tokens", "16384") as server:
        yield server
    text = log.read_text()
    assert "kv tokens 16384" in text
    assert not re.search("segfault|segmentation|core dumped", text, re.IGNORECASE)


def ask(server: Serving, **sampling: Any) -> Answer:
    inputs = {"messages": QUESTION, "stream": True, "sampling_parameters": sampling} | EVERYTHING
    return server.ask(inputs)


def test_answers_many_streams_at_once(server: Serving) -> None:
    with ThreadPoolExecutor(STREAMS) as threads:
        jobs = [threads.submit(ask, server, max_tokens=64) for _ in range(STREAMS)]
        answers = [job.result() for job in jobs]
    for answer in answers:
        assert answer.error is None
        assert answer.text.endswith("The sum is 4438.")
        assert answer.finish_reason == "stop"
    wait_for(server.is_idle)


def test_cancelled_streams_give_their_pages_back(server: Serving) -> None:
    sampling = {"max_tokens": 1024, "unmasking": "quota", "ignore_eos": True}
    streams = [Stream(server.grpc_url) for _ in range(8)]
    for stream in streams:
        stream.send({"messages": QUESTION, "sampling_parameters": sampling})
    wait_for(lambda: server.gauges()["sangam_kv_pages_used"] > 0)
    for stream in streams:
        stream.close(cancel=True)
    wait_for(server.is_idle)
    assert ask(server, max_tokens=64).text.endswith("The sum is 4438.")
