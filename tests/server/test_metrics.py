"""What /metrics says after a load adds up to what the clients saw."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server.harness import EVERYTHING, Answer, Serving, serving, wait_for

REQUESTS = 24
INVALID = "invalid_arg"
MODES = ["colocated", "disaggregated", "hybrid"]


def totals(server: Serving) -> dict[str, float]:
    """Every counter, its labels but model and instance in its name, summed over the instances."""
    _, text = server.http("/metrics", port=2)
    sums: dict[str, float] = {}
    for name, labels, value in re.findall(r"^(sangam_\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        own = re.sub(r'(model|instance)="[^"]*",?', "", labels).rstrip(",")
        key = f"{name}{{{own}}}" if own else name
        sums[key] = sums.get(key, 0) + float(value)
    return sums


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
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda number: ask(server, number), range(REQUESTS)))
        refused = server.ask({"input_ids": [5], "sampling_parameters": {"max_tokens": -1}})
        assert refused.error is not None
        wait_for(server.is_idle, 5)
        ended = f'sangam_requests_total{{outcome="{INVALID}"}}'
        wait_for(lambda: totals(server).get(ended) == 1, 5)
        wait_for(lambda: totals(server)["sangam_request_seconds_count"] == REQUESTS, 5)
        found = totals(server)
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
    assert sum(found.get(f'sangam_iterations_total{{kind="{k}"}}', 0) for k in (*kinds, "mixed"))
    assert found["sangam_blocks_finished_total"] > 0
    assert found["sangam_iteration_tokens_total"] > found["sangam_generated_tokens_total"]
    assert bool(found["sangam_kv_pull_seconds_total"]) == (mode != "colocated")
