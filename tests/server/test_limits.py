"""More than the server may hold: it stays within its memory, and serves all of them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from server.harness import Answer, Serving, Stream, serving, wait_for

REQUESTS = 5000
STREAMS = 100
QUEUE = 300
LIMIT = "that is the limit (max_queue_size)"
TIMEOUT = "[CANCELLED] the request ran longer than its timeout"
GROWTH = 150 << 20
"""Bytes by which the server's processes may grow in a flood."""
SLOW = {
    "text_input": "a",
    "stream": True,
    "max_tokens": 512,
    "sampling_parameters": {"ignore_eos": True, "unmasking": "quota"},
}
QUICK = {"text_input": "a", "max_tokens": 4}


def resident(server: Serving) -> int:
    """Bytes that tritonserver, its stubs and their engines hold of their own."""
    triton, stubs = server.tree()
    total = 0
    for pid in (triton, *stubs, *server.engines("")):
        status = Path(f"/proc/{pid}/status").read_text()
        total += int(status.partition("RssAnon:")[2].split()[0]) << 10
    return total


def flood(server: Serving) -> tuple[Counter[str], list[Answer]]:
    """Sends all at once; counts how they ended."""
    streams = [Stream(server.grpc_url) for _ in range(STREAMS)]
    for number in range(REQUESTS):
        streams[number % STREAMS].send(QUICK)
    ends: Counter[str] = Counter()
    answers = []
    for stream in streams:
        for _ in range(REQUESTS // STREAMS):
            answer = stream.receive()
            ends[str(answer.error)] += 1
            answers.append(answer)
        stream.close()
    return ends, answers


@pytest.fixture(scope="module", params=["colocated", "disaggregated"])
def small(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    """Serves one request at a time, each for a second."""
    options = ("--max-batch-size=1", "--max-request-time=1")
    log = tmp_path_factory.mktemp("small") / "log"
    with serving(log, f"--mode={request.param}", *options, "--max-prompt-tokens=8") as server:
        yield server


def test_the_longest_time(small: Serving) -> None:
    started = time.monotonic()
    error = small.ask(SLOW).error
    assert error is not None
    assert TIMEOUT in error
    assert time.monotonic() - started > 1
    wait_for(small.is_idle)


def test_a_long_prompt_is_refused(small: Serving) -> None:
    refused = small.ask({"input_ids": [7] * 9, "max_tokens": 4}).error
    assert refused is not None
    assert "[INVALID_ARG] the prompt is 9 tokens long, the limit is 8 tokens" in refused
    refused = small.ask({"text_input": "a" * 1025}).error
    assert refused is not None
    assert "text_input is 1025 characters long, the limit is 1024 characters" in refused
    assert small.ask({"input_ids": [7] * 8, "max_tokens": 4}).error is None


def test_a_full_queue(tmp_path: Path) -> None:
    with serving(tmp_path / "log", "--backlog=1", "--max-queue-size=2") as server:

        def ask(timeout: int | None = None) -> Stream:
            stream = Stream(server.grpc_url)
            stream.send(SLOW, timeout=timeout)
            return stream

        streams = [ask()]
        wait_for(lambda: server.gauges()["sangam_requests_decoding"] > 0)
        streams += [ask(timeout=500_000), ask()]
        wait_for(lambda: server.gauges()["sangam_requests_waiting"] == 2)
        assert server.ask(SLOW).error == f"[UNAVAILABLE] 2 requests wait already, {LIMIT}"
        first, hasty, leaving = streams
        assert str(hasty.receive().error).startswith(TIMEOUT)
        leaving.close(cancel=True)
        wait_for(lambda: server.gauges()["sangam_requests_waiting"] == 0)
        last = ask()
        wait_for(lambda: server.gauges()["sangam_requests_waiting"] == 1)
        for stream in (first, last):
            assert stream.receive().error is None
            stream.close()
        wait_for(server.is_idle)


def test_a_flood(tmp_path: Path) -> None:
    with serving(tmp_path / "log", f"--max-queue-size={QUEUE}") as server:
        for _ in range(20):
            expected = server.ask(QUICK)
        before = resident(server)
        ends, answers = flood(server)
        grown = resident(server) - before
        refused = ends.pop(f"[UNAVAILABLE] {QUEUE} requests wait already, {LIMIT}", 0)
        assert ends == {"None": REQUESTS - refused}
        assert 0 < refused < REQUESTS - QUEUE
        assert all(answer.ids == expected.ids for answer in answers if answer.error is None)
        assert grown < GROWTH, f"{grown >> 20} MiB"
        wait_for(server.is_idle)
        started = time.monotonic()
        assert server.ask(QUICK) == expected
        assert time.monotonic() - started < 10
