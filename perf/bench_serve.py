"""Open-loop load on a server over gRPC: every request is sent when it is due.

    python perf/bench_serve.py --url localhost:8001 --rate 4 --requests 200 --output load
    python perf/bench_serve.py --model CHECKPOINT --mode hybrid --trace trace.jsonl --output load \\
      --serve="--prefill-instances 2 --gpus 0,1"

The first loads a running server, the second starts one. The output is a folder: summary.json,
requests.csv, and latency.svg.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import dataclasses
import json
import math
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from load_plot import plot
from sangam_client import AsyncClient, SangamError
from tqdm import tqdm
from workload import Job, make_jobs, read_trace

from sangam_backend.background import background_server

QUANTILES = (0.5, 0.9, 0.95, 0.99)
START_SECONDS = 600.0


@dataclass(slots=True)
class Outcome:
    """What became of a request; all times in seconds."""

    arrival: float
    """When it was due, after the start of the load."""
    late: float = 0.0
    """How much later it was sent: the load generator's own fault."""
    first_text: float = math.nan
    """From its arrival to the first committed text."""
    latency: float = math.nan
    """From its arrival to its end."""
    commits: list[float] = field(default_factory=list)
    """Between one piece of text and the next."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    """Up to the end of the answer, not of the canvas."""
    forwards: int = 0
    """Of the model, for its answer."""
    error: str = ""

    @property
    def normalised(self) -> float:
        """Latency by output token."""
        return self.latency / max(self.output_tokens, 1)


async def send(
    client: AsyncClient, job: Job, started: float, deadline: float, sampling: dict[str, Any]
) -> Outcome:
    await asyncio.sleep(max(0.0, started + job.arrival - time.perf_counter()))
    due = started + job.arrival
    outcome = Outcome(job.arrival, late=time.perf_counter() - due)
    options = sampling | {"max_tokens": job.max_tokens, "seed": job.seed}
    last = 0.0
    try:
        async for chunk in client.stream(job.prompt, timeout=deadline, **options):
            now = time.perf_counter() - due
            if chunk.output_ids:
                if last:
                    outcome.commits.append(now - last)
                else:
                    outcome.first_text = now
                last = now
            outcome.prompt_tokens = chunk.num_input_tokens or outcome.prompt_tokens
            outcome.output_tokens += chunk.num_output_tokens or 0
            outcome.forwards = chunk.num_forwards or outcome.forwards
    except SangamError as error:
        outcome.error = str(error)
    outcome.latency = time.perf_counter() - due
    return outcome


async def run_load(
    url: str, jobs: Sequence[Job], deadline: float, sampling: dict[str, Any]
) -> tuple[list[Outcome], float]:
    """The outcomes in the order of the jobs, and how long the load took."""
    async with AsyncClient(url) as client:
        started = time.perf_counter()
        tasks = [
            asyncio.create_task(send(client, job, started, deadline, sampling)) for job in jobs
        ]
        with tqdm(total=len(tasks), unit="request") as bar:
            for done in asyncio.as_completed(tasks):
                await done
                bar.update()
        return [task.result() for task in tasks], time.perf_counter() - started


def answer_warm_up(
    url: str, jobs: Sequence[Job], deadline: float, sampling: dict[str, Any]
) -> list[Outcome]:
    """Sends the jobs at once: what only the first requests do stays out of the times."""
    at_once = [dataclasses.replace(job, arrival=0.0) for job in jobs]
    outcomes, _ = asyncio.run(run_load(url, at_once, deadline, sampling))
    return outcomes


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that this share of what is a number does not exceed; NaN for none."""
    ordered = sorted(value for value in values if not math.isnan(value))
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def spread(values: Sequence[float]) -> dict[str, float]:
    """Quantiles and the largest of what is a number."""
    shares = {f"p{100 * share:g}": share for share in QUANTILES} | {"max": 1.0}
    chosen = {name: round(quantile(values, share), 4) for name, share in shares.items()}
    return {} if math.isnan(chosen["max"]) else chosen


def samples(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """What the requests that did not fail took, by metric, in seconds."""
    good = [outcome for outcome in outcomes if not outcome.error]
    return {
        "first text": [outcome.first_text for outcome in good],
        "between commits": [gap for outcome in good for gap in outcome.commits],
        "latency": [outcome.latency for outcome in good],
        "latency by token": [outcome.normalised for outcome in good],
    }


def count_failures(outcomes: Sequence[Outcome]) -> dict[str, int]:
    return dict(Counter(outcome.error for outcome in outcomes if outcome.error))


def summarise(outcomes: Sequence[Outcome], seconds: float, sla: dict[str, float]) -> dict[str, Any]:
    """What an operator asks of a load test."""
    good = [outcome for outcome in outcomes if not outcome.error]
    tokens = sum(outcome.output_tokens for outcome in good)
    forwards = [outcome.forwards for outcome in good]
    met = [outcome for outcome in good if meets(outcome, sla)]
    return {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(good),
        "failures": count_failures(outcomes),
        "seconds": round(seconds, 3),
        "requests/s": round(len(good) / seconds, 3),
        "output tokens/s": round(tokens / seconds, 1),
        "output tokens/forward": round(tokens / max(sum(forwards), 1), 2),
        "forwards": spread(forwards),
        **{metric: spread(values) for metric, values in samples(outcomes).items()},
        "sent late": spread([outcome.late for outcome in outcomes]),
        "sla": sla,
        "goodput requests/s": round(len(met) / seconds, 3),
    }


def meets(outcome: Outcome, sla: dict[str, float]) -> bool:
    """Whether a request kept every limit; one that was never reached keeps none."""
    values = {
        "first_text": outcome.first_text,
        "latency": outcome.latency,
        "commit": max(outcome.commits, default=0.0),
    }
    return all(values[name] <= limit for name, limit in sla.items())


def parse_sla(texts: Sequence[str]) -> dict[str, float]:
    """`first_text=2`, `latency=10`, `commit=0.5`: seconds that a request may take."""
    sla = {}
    for text in texts:
        name, _, limit = text.partition("=")
        if name not in ("first_text", "latency", "commit"):
            raise ValueError(f"sla is {text!r}, must be first_text=S, latency=S or commit=S")
        sla[name] = float(limit)
    return sla


def write_requests(path: Path, outcomes: Sequence[Outcome]) -> None:
    with path.open("w", newline="") as file:
        rows = [dataclasses.asdict(outcome) for outcome in outcomes]
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        for row in rows:
            commits = " ".join(f"{gap:.4f}" for gap in row["commits"])
            writer.writerow(row | {"commits": commits})


@contextlib.contextmanager
def loaded_server(args: argparse.Namespace) -> Iterator[str]:
    """The address of the server to load: the given one, or one of our own."""
    if args.url:
        yield args.url
        return
    args.output.mkdir(parents=True, exist_ok=True)
    options = ["--model", args.model, f"--mode={args.mode}", *shlex.split(args.serve)]
    with background_server(options, args.output / "server.log", START_SECONDS) as server:
        yield server.url


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    server = parser.add_mutually_exclusive_group(required=True)
    server.add_argument("--url", help="gRPC address of a running server")
    server.add_argument("--model", help="start a server on this checkpoint")
    parser.add_argument("--mode", default="colocated")
    parser.add_argument("--serve", default="", help="further options of `sangam serve`, one string")
    parser.add_argument(
        "--trace", type=Path, help="a whole load in place of lengths and arrivals: see read_trace"
    )
    parser.add_argument("--trace-speed", type=float, default=1.0)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--rate", type=float, default=0.0, help="requests/s; 0 sends all at once")
    parser.add_argument("--arrivals", default="poisson", help="see workload.gaps")
    parser.add_argument("--prompt-lengths", default="512", help="see workload.parse_lengths")
    parser.add_argument("--output-lengths", default="256", help="as --prompt-lengths")
    parser.add_argument("--vocabulary", type=int, default=256, help="random ids are below it")
    parser.add_argument("--sampling", type=json.loads, default={}, help="a JSON object")
    parser.add_argument("--warm-up", type=int, default=4, help="requests before those measured")
    parser.add_argument("--deadline", type=float, default=600.0, help="seconds for a request")
    parser.add_argument("--sla", nargs="*", default=[], help="first_text=S latency=S commit=S")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True, help="folder")
    args = parser.parse_args()
    try:
        sla = parse_sla(args.sla)
        jobs = (
            read_trace(args.trace, args.vocabulary, args.seed, args.trace_speed)
            if args.trace
            else make_jobs(
                args.requests, args.arrivals, args.rate, args.prompt_lengths,
                args.output_lengths, args.vocabulary, args.seed,
            )
        )  # fmt: skip
    except (OSError, ValueError) as error:
        raise SystemExit(f"bench_serve: {error}") from None
    with loaded_server(args) as url:
        warm = answer_warm_up(url, jobs[: args.warm_up], args.deadline, args.sampling)
        outcomes, seconds = asyncio.run(run_load(url, jobs, args.deadline, args.sampling))
    settings = {key: str(value) for key, value in vars(args).items()}
    summary = {"settings": settings} | summarise(outcomes, seconds, sla)
    summary["warm-up failures"] = count_failures(warm)
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "summary.json").write_text(json.dumps(summary, indent=1))
    write_requests(args.output / "requests.csv", outcomes)
    plot(args.output / "latency.svg", outcomes, samples(outcomes))
    print(json.dumps({key: value for key, value in summary.items() if key != "settings"}, indent=1))


if __name__ == "__main__":
    main()
