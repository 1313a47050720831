"""Many clients at once, some of which leave; the others must not notice."""

from __future__ import annotations

import multiprocessing
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from server import jobs
from server.harness import Serving, Stream, wait_for
from server.jobs import REQUESTS, inputs_of

TEXT = "Add 4363 and 75."
SECONDS = 8.0
"""Over which the requests arrive."""
PROCESSES = 4
"""Of clients that are killed, and hold a sixth of the requests."""


def ask_later(server: Serving, line: dict[str, Any]) -> dict[str, Any]:
    draw = random.Random(line["id"])
    time.sleep(draw.uniform(0, SECONDS))
    return jobs.ask(server, line, stream=draw.random() < 0.5)


def ask_and_cancel(server: Serving, line: dict[str, Any]) -> None:
    draw = random.Random(line["id"])
    time.sleep(draw.uniform(0, SECONDS))
    stream = Stream(server.grpc_url)
    # Triton 24.10 may crash when a cancel meets a response that is being written.
    stream.send(inputs_of(line, stream=False))
    time.sleep(draw.uniform(0, 0.3))
    stream.close(cancel=True)


def be_killed(url: str, lines: list[dict[str, Any]]) -> None:
    for line in lines:
        Stream(url).send(inputs_of(line, stream=False))
        time.sleep(0.5)
    time.sleep(60)


def kill_clients(server: Serving, lines: list[dict[str, Any]]) -> None:
    spawn = multiprocessing.get_context("spawn")
    for number in range(PROCESSES):
        client = spawn.Process(target=be_killed, args=(server.grpc_url, lines[number::PROCESSES]))
        client.start()
        time.sleep(random.Random(number).uniform(3, 5))
        client.kill()
        client.join()


def test_storm(
    server: Serving, lines: list[dict[str, Any]], answers_alone: list[dict[str, Any]]
) -> None:
    leaving, staying = lines[: REQUESTS // 3], lines[REQUESTS // 3 :]
    cancelled, killed = leaving[::2], leaving[1::2]
    with ThreadPoolExecutor(REQUESTS) as pool:
        cancels = [pool.submit(ask_and_cancel, server, line) for line in cancelled]
        kills = pool.submit(kill_clients, server, killed)
        answers = list(pool.map(lambda line: ask_later(server, line), staying))
        for cancel in [*cancels, kills]:
            cancel.result()
    wait_for(server.is_idle)
    assert answers == answers_alone[REQUESTS // 3 :]
    assert server.ask({"text_input": TEXT, "max_tokens": 4}).error is None


def test_a_cancelled_request_frees_its_pages_at_once(server: Serving) -> None:
    sampling = {"unmasking": "quota", "ignore_eos": True, "max_tokens": 1024}
    wait_for(server.is_idle)
    before = server.outcomes("cancelled")
    stream = Stream(server.grpc_url)
    stream.send({"text_input": TEXT, "sampling_parameters": sampling})
    wait_for(lambda: server.gauges()["sangam_kv_pages_used"] > 0)
    stream.close(cancel=True)
    wait_for(lambda: server.outcomes("cancelled") == before + 1)
    wait_for(server.is_idle)
