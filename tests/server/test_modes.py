"""Disaggregated and hybrid serving give the colocated answers, whatever dies on the way."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from server import jobs
from server.harness import ANSWER_SECONDS, Answer, Serving, Stream, serving, wait_for
from server.jobs import REQUESTS

LONG = {"unmasking": "quota", "ignore_eos": True, "max_tokens": 256}
SOON = 6.0
"""Twice the promise, for a slow machine; a lost lease would take longer."""


class Topology(NamedTuple):
    mode: str
    prefill: int
    decode: int
    options: tuple[str, ...] = ()

    def serve(self, log: Path, *options: str) -> Any:
        return serving(
            log,
            f"--mode={self.mode}",
            f"--prefill-instances={self.prefill}",
            f"--decode-instances={self.decode}",
            "--kv-cache-tokens=8192",
            *self.options,
            *options,
        )


OVERFLOWING = ("--prefill-overflow-tokens=200",)
TOPOLOGIES = [
    Topology("disaggregated", 1, 1),
    Topology("disaggregated", 2, 2),
    Topology("hybrid", 1, 2, OVERFLOWING),
    Topology("hybrid", 2, 1, OVERFLOWING),
]


def ask_a_line(server: Serving, line: dict[str, Any]) -> dict[str, Any]:
    return jobs.ask(server, line, stream=random.Random(line["id"]).random() < 0.5)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda t: f"{t.mode}-{t.prefill}-{t.decode}")
def test_answers_are_the_colocated_ones(
    topology: Topology,
    lines: list[dict[str, Any]],
    answers_alone: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    with topology.serve(tmp_path / "log") as server, ThreadPoolExecutor(40) as pool:
        answers = list(pool.map(lambda line: ask_a_line(server, line), lines))
        assert answers == answers_alone
        wait_for(server.is_idle)
        gauges = server.gauges()
        assert gauges["sangam_blocks_handed_over_total"] > REQUESTS / 2
        assert gauges["sangam_kv_pulled_bytes_total"] > 0
        assert bool(gauges["sangam_prefill_overflows_total"]) == (topology.mode == "hybrid")
        status, text = server.generate({"text_input": "Add 4363 and 75.", "max_tokens": 8})
        assert status == 200, text


def send(server: Serving, **options: Any) -> Stream:
    stream = Stream(server.grpc_url)
    sampling = LONG | options
    stream.send({"input_ids": [1, 2, 3], "stream": True, "sampling_parameters": sampling})
    return stream


def first_piece(stream: Stream) -> Answer:
    answer = Answer()
    while not answer.pieces and answer.error is None:
        stream.receive_into(answer)
    return answer


def end(stream: Stream, answer: Answer) -> Answer:
    while not (answer.finals or answer.error):
        stream.receive_into(answer)
    stream.close()
    return answer


def test_a_client_that_leaves_stops_at_its_next_block(tmp_path: Path) -> None:
    with Topology("disaggregated", 1, 1).serve(tmp_path / "log") as server:
        stream = send(server, max_tokens=1024)
        first_piece(stream)
        stream.close(cancel=True)
        wait_for(lambda: server.outcomes("cancelled") == 1)
        wait_for(server.is_idle)
        assert end(send(server), Answer()).error is None


@pytest.mark.parametrize("mode", ["colocated", "disaggregated", "hybrid"])
def test_a_timeout_ends_the_request(mode: str, tmp_path: Path) -> None:
    with serving(tmp_path / "log", f"--mode={mode}") as server:
        stream = Stream(server.grpc_url)
        inputs = {"input_ids": [1, 2, 3], "stream": True}
        sampling = LONG | {"max_tokens": 1024}
        stream.send({**inputs, "sampling_parameters": sampling}, timeout=700_000)
        started = time.monotonic()
        answer = stream.receive()
        stream.close()
        assert answer.error is not None
        assert "[CANCELLED] the request ran longer than its timeout" in answer.error
        assert time.monotonic() - started > 0.6
        wait_for(server.is_idle)
        body = {"text_input": "Hi", "timeout": 300_000, **LONG, "max_tokens": 1024}
        status, text = server.generate(body)
        assert status != 200
        assert "ran longer than its timeout" in text
        wait_for(server.is_idle)


def test_a_full_pool_on_either_side_only_delays(tmp_path: Path) -> None:
    options = ("--kv-cache-tokens=600", "--max-batch-size=2")
    with Topology("disaggregated", 1, 1).serve(tmp_path / "log", *options) as server:
        streams = [send(server, max_tokens=96) for _ in range(5)]
        for stream in streams:
            assert end(stream, Answer()).error is None
        wait_for(server.is_idle)
        status, text = server.http("/v2/models/sangam_decode/generate", {"handover": "forged"})
        assert status == 400
        assert "[INVALID_ARG] handover was not made by a prefill instance" in text


def test_a_frozen_decode_instance_is_given_up(tmp_path: Path) -> None:
    """As when a report is lost: the lease runs out, and late reports change nothing."""
    with Topology("disaggregated", 1, 1).serve(tmp_path / "log", "--grace=5") as server:
        # One block, so that Triton has no step to start meanwhile.
        stream = send(server, max_tokens=128, block_length=128)
        wait_for(lambda: server.gauges()["sangam_requests_decoding"] > 0)
        (pid,) = server.engines("sangam_decode")
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        answer = end(stream, Answer())
        assert answer.error is not None
        assert "the decode instance that held a block was lost" in answer.error
        assert time.monotonic() - started < ANSWER_SECONDS / 2
        os.kill(pid, signal.SIGCONT)
        wait_for(server.is_idle)
        assert end(send(server), Answer()).error is None


def test_a_prefill_instance_that_dies_takes_only_its_own_requests(tmp_path: Path) -> None:
    """Their clients hear of it within 3 s, those that wait for a prefill too."""
    with Topology("disaggregated", 2, 1).serve(
        tmp_path / "log", "--backlog=2", "--grace=5"
    ) as server:
        streams = [send(server, seed=number) for number in range(8)]
        wait_for(lambda: server.gauges()["sangam_blocks_handed_over_total"] > 4)
        engines = server.engines("sangam_prefill")
        lost = kill_one_of(engines, streams, "the prefill instance was lost")
        wait_for(lambda: server.outcomes("unavailable") == lost)


def kill_one_of(engines: list[int], streams: list[Stream], message: str) -> int:
    """The first is killed: some of the streams, so many, then end with the message, the others
    well.
    """
    os.kill(engines[0], signal.SIGKILL)
    killed = time.monotonic()
    with ThreadPoolExecutor(len(streams)) as pool:
        answers = list(pool.map(lambda stream: end_at(stream), streams))
    errors = [(answer.error, at - killed) for answer, at in answers if answer.error]
    assert 0 < len(errors) < len(streams)
    for error, seconds in errors:
        assert message in error
        assert seconds < SOON
    for answer, _ in answers:
        assert answer.error or len(answer.ids) == LONG["max_tokens"]
    return len(errors)


def decoding_instances(server: Serving) -> list[str]:
    """The numbers of the decode instances that hold a block."""
    _, text = server.http("/metrics", port=2)
    line = r'^sangam_requests_decoding{.*instance="sangam_decode_0_(\d)".*} [1-9]'
    return re.findall(line, text, re.MULTILINE)


def end_at(stream: Stream) -> tuple[Answer, float]:
    return end(stream, Answer()), time.monotonic()


def test_a_decode_instance_that_dies_takes_only_the_blocks_it_held(tmp_path: Path) -> None:
    """Their clients hear of it within 3 s; a new engine process then works in its place."""
    with Topology("disaggregated", 1, 2).serve(tmp_path / "log", "--grace=5") as server:
        streams = [send(server, seed=number) for number in range(8)]
        wait_for(lambda: server.gauges()["sangam_blocks_handed_over_total"] > 8)
        # Under load an instance may hold nothing for a while.
        holding: list[str] = []

        def look() -> bool:
            holding.extend(decoding_instances(server))
            return bool(holding)

        wait_for(look)
        (dead,) = server.engines("sangam_decode", holding[0])
        (other,) = set(server.engines("sangam_decode")) - {dead}
        lost = kill_one_of([dead], streams, "the decode instance that held a block was lost")
        wait_for(lambda: server.outcomes("unavailable") == lost)
        wait_for(lambda: len(server.engines("sangam_decode")) == 2)
        assert dead not in server.engines("sangam_decode")
        assert other in server.engines("sangam_decode")
        with ThreadPoolExecutor(8) as pool:
            futures = [pool.submit(lambda: end(send(server), Answer())) for _ in range(8)]
            assert [future.result().error for future in futures] == [None] * 8
        wait_for(server.is_idle)
