"""Loads are what they are asked to be, and their report counts right."""

from __future__ import annotations

import json
import math
import random
import statistics
from itertools import islice
from pathlib import Path

import pytest
from bench_serve import Outcome, meets, parse_sla, spread, summarise
from workload import gaps, make_jobs, parse_lengths, read_trace


@pytest.mark.parametrize(
    ("kind", "variation"), [("poisson", 1.0), ("static", 0.0), ("gamma:0.5", 0.5), ("gamma:2", 2.0)]
)
def test_arrivals_have_the_rate_and_the_variation(kind: str, variation: float) -> None:
    drawn = list(islice(gaps(kind, 4.0, random.Random(0)), 40_000))
    mean = statistics.mean(drawn)
    assert mean == pytest.approx(0.25, rel=0.03)
    assert statistics.pstdev(drawn) / mean == pytest.approx(variation, rel=0.05, abs=1e-9)


def test_lengths() -> None:
    rng = random.Random(0)
    assert parse_lengths("512")(rng) == 512
    uniform = [parse_lengths("uniform:10:20")(rng) for _ in range(2000)]
    assert (min(uniform), max(uniform)) == (10, 20)
    zipf = [parse_lengths("zipf:1.5:8:64")(rng) for _ in range(2000)]
    assert min(zipf) == 8
    assert max(zipf) <= 64
    assert zipf.count(8) > zipf.count(9) > zipf.count(16)
    for wrong in ("uniform:1", "normal:1:2", "many"):
        with pytest.raises(ValueError, match=r"many|lengths are"):
            parse_lengths(wrong)


def test_jobs_are_the_same_for_a_seed() -> None:
    made = make_jobs(20, "poisson", 5.0, "uniform:1:9", "zipf:1:4:8", 100, seed=3)
    assert made == make_jobs(20, "poisson", 5.0, "uniform:1:9", "zipf:1:4:8", 100, seed=3)
    assert [job.arrival for job in made] == sorted(job.arrival for job in made)
    assert len({job.seed for job in made}) == 20
    at_once = make_jobs(5, "poisson", 0.0, "4", "8", 100, seed=0)
    assert {job.arrival for job in at_once} == {0.0}


def test_traces(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    messages = [{"role": "user", "content": "Hi"}]
    lines = [
        {"arrival": 4, "prompt_tokens": 7, "max_tokens": 32},
        {"arrival": 1, "messages": messages, "max_tokens": 16},
        {"input_ids": [5, 6], "max_tokens": 8},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    jobs = read_trace(path, vocabulary=50, seed=0, speed=2.0)
    assert [job.arrival for job in jobs] == [0.0, 0.5, 2.0]
    assert jobs[1].prompt == messages
    assert len(jobs[2].prompt) == 7
    path.write_text('{"prompt_tokens": 7}\n')
    with pytest.raises(ValueError, match=r"line 1.*max_tokens"):
        read_trace(path, vocabulary=50, seed=0)


def test_arrivals_and_lengths_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [(3, 30, 8), (1, 10, 4), (2, 20, 6)]
    names = ("arrival", "prompt_tokens", "max_tokens")
    path.write_text("".join(json.dumps(dict(zip(names, line))) + "\n" for line in lines))
    recorded = f"trace:{path}"
    jobs = make_jobs(5, "static", 2.0, recorded, recorded, 100, seed=0)
    assert [len(job.prompt) for job in jobs] == [30, 10, 20, 30, 10]
    assert [job.max_tokens for job in jobs] == [8, 4, 6, 8, 4]
    jobs = make_jobs(4, recorded, 2.0, "4", "uniform:1:9", 100, seed=0)
    assert [job.arrival for job in jobs] == [0.0, 0.5, 1.0, 1.5]
    path.write_text('{"arrival": 1, "max_tokens": 4}\n')
    with pytest.raises(ValueError, match=r"line 1: prompt_tokens is None"):
        make_jobs(1, "static", 2.0, recorded, recorded, 100, seed=0)
    with pytest.raises(ValueError, match="arrive at once"):
        make_jobs(1, recorded, 2.0, "4", "4", 100, seed=0)


def test_the_report() -> None:
    outcomes = [
        Outcome(0.1 * n, first_text=n, latency=2.0 * n, commits=[0.5], output_tokens=10, forwards=n)
        for n in range(1, 11)
    ]
    outcomes.append(Outcome(2.0, error="gone"))
    report = summarise(outcomes, seconds=5.0, sla={"first_text": 4.0})
    assert (report["requests"], report["failed"], report["failures"]) == (11, 1, {"gone": 1})
    assert report["output tokens/s"] == 20.0
    assert report["output tokens/forward"] == round(100 / 55, 2)
    assert report["forwards"] == {"p50": 5, "p90": 9, "p95": 10, "p99": 10, "max": 10}
    assert report["first text"] == {"p50": 5, "p90": 9, "p95": 10, "p99": 10, "max": 10}
    assert report["latency by token"]["max"] == 2.0
    assert report["goodput requests/s"] == 0.8
    assert spread([math.nan]) == {}
    assert not meets(Outcome(0.0), {"latency": 1.0})
    assert parse_sla(["latency=3", "commit=0.5"]) == {"latency": 3.0, "commit": 0.5}
    with pytest.raises(ValueError, match="sla is"):
        parse_sla(["p90=3"])
