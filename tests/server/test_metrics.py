"""What /metrics says while a load runs and after it adds up to what the clients saw."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from server.harness import EVERYTHING, Answer, Serving, serving, wait_for

from sangam_backend.scrape import HELD_REQUESTS
from sangam_backend.server.readings import GAUGES

REQUESTS = 24
REFUSED: list[dict[str, Any]] = [
    {"input_ids": [5], "sampling_parameters": {"max_tokens": -1}},
    # These do not get as far as the engine process.
    {"text_input": b"caf\xe9"},
    {"messages": "hello"},
    {"input_ids": [5], "sampling_parameters": "{"},
]
MODES = ["colocated", "disaggregated", "hybrid"]


def ask(server: Serving, number: int) -> tuple[Answer, float]:
    sampling: dict[str, Any] = {"max_tokens": 20 + 8 * (number % 6), "ignore_eos": number % 2 == 0}
    inputs = {"input_ids": [1 + number] * (1 + number), "stream": number % 3 > 0}
    started = time.monotonic()
    answer = server.ask(inputs | EVERYTHING | {"sampling_parameters": sampling})
    return answer, time.monotonic() - started


@pytest.mark.parametrize("mode", MODES)
def test_metrics_add_up(mode: str, tmp_path: Path) -> None:
    options = ("--prefill-overflow-tokens=100",) if mode == "hybrid" else ()
    with serving(tmp_path / "log", f"--mode={mode}", *options) as server:
        scrapes = []
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, server, number) for number in range(REQUESTS)]
            while not all(future.done() for future in asked):
                scrapes.append(server.totals())
                time.sleep(0.01)
        answers = [future.result() for future in asked]
        for inputs in REFUSED:
            assert "[INVALID_ARG]" in str(server.ask(inputs).error)
        wait_for(server.is_idle)
        wait_for(lambda: server.outcomes("invalid_arg") == len(REFUSED))
        wait_for(lambda: server.totals()["sangam_request_seconds_count"] == REQUESTS)
        found = server.totals()
    check_scrapes([*scrapes, found])
    finished = [answer.finish_reason for answer, _ in answers]
    for reason in ("stop", "length"):
        key = f'sangam_requests_total{{outcome="{reason}"}}'
        assert found.get(key, 0) == finished.count(reason)
    assert found["sangam_prompt_tokens_total"] == sum(range(1, REQUESTS + 1))
    assert found["sangam_generated_tokens_total"] == sum(len(answer.ids) for answer, _ in answers)
    with_text = sum(bool(answer.ids) for answer, _ in answers)
    assert found["sangam_first_text_seconds_count"] == with_text > REQUESTS / 2
    assert found['sangam_request_seconds_bucket{le="+Inf"}'] == REQUESTS
    # The client's times have the way there in them, and a new connection each.
    seconds = found["sangam_request_seconds_sum"]
    assert found["sangam_queue_seconds_sum"] < seconds < sum(seconds for _, seconds in answers)
    assert found["sangam_between_commits_seconds_count"] > 0
    kinds = ("prefill", "decode")
    prefills, decodes = (found[f'sangam_forwards_total{{kind="{kind}"}}'] for kind in kinds)
    assert prefills >= found["sangam_queue_seconds_count"] == REQUESTS
    assert decodes > 0
    iterations = sum(
        found.get(f'sangam_iterations_total{{kind="{kind}"}}', 0) for kind in (*kinds, "mixed")
    )
    assert found["sangam_batch_size_count"] == iterations > 0
    assert found["sangam_batch_size_sum"] == prefills + decodes
    assert found['sangam_batch_size_bucket{le="8"}'] == iterations
    assert found["sangam_blocks_finished_total"] > 0
    assert found["sangam_iteration_tokens_total"] > found["sangam_generated_tokens_total"]
    assert bool(found["sangam_kv_pull_seconds_total"]) == (mode != "colocated")
    # A request that has ended may have had forwards whose outcome was not needed.
    assert prefills + decodes >= sum(answer.pieces[-1]["num_forwards"] for answer, _ in answers)


def check_scrapes(scrapes: list[dict[str, float]]) -> None:
    """The counters never fall, and the gauges tell of the load; the last scrape is after it."""
    for before, after in pairwise(scrapes):
        assert [
            name
            for name, value in before.items()
            if name not in GAUGES and value > after.get(name, 0)
        ] == []
    *during, after = scrapes
    assert (
        0 < max(each["sangam_kv_pages_used"] for each in during) <= after["sangam_kv_pages_total"]
    )
    assert max(sum(each[name] for name in HELD_REQUESTS) for each in during) > 1
    counted = [each["sangam_generated_tokens_total"] for each in during]
    assert any(0 < tokens < after["sangam_generated_tokens_total"] for tokens in counted)
