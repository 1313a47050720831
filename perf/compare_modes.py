"""One checkpoint served in every mode, the same loads on each.

    python perf/compare_modes.py --model perf/shapes/llada-8b --vocabulary 126000 --gpus 0,1 \\
        --serve "--load-format dummy --kv-cache-tokens 52000" --output modes

Colocated serving gets an instance on each GPU; the other modes prefill on the first half of the
GPUs and decode on the second (on the same one if there is but one, and on the CPU if none is
named). The output is a folder: a log of each server, and modes.json with what the table shows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench_serve import START_SECONDS, Outcome, answer_warm_up, run_load, spread, summarise
from sangam_client import Client
from workload import Job, make_jobs

from sangam_backend.background import BackgroundServer, background_server

MODES = ("colocated", "disaggregated", "hybrid")
SAMPLING: dict[str, Any] = {"unmasking": "quota", "tokens_per_step": 4, "ignore_eos": True}
ALONE = 8
"""Requests of the load that sends one at a time."""
LONG_SHARE = 1 / 8
"""Of the requests of the mixed load."""
WATCHED = {
    "blocks": "sangam_blocks_finished_total",
    "overflows": "sangam_prefill_overflows_total",
    "pulled bytes": "sangam_kv_pulled_bytes_total",
    "pull seconds": "sangam_kv_pull_seconds_total",
}


def mode_options(mode: str, gpus: Sequence[str], overflow: int | None) -> list[str]:
    if mode == "colocated":
        pools = {"": gpus}
        options = [f"--instances={max(1, len(gpus))}"]
    else:
        half = max(1, len(gpus) // 2)
        pools = {"prefill-": gpus[:half], "decode-": gpus[half:] or gpus}
        options = [f"--{name}instances={max(1, len(pool))}" for name, pool in pools.items()]
    options += [f"--{name}gpus={','.join(pool)}" for name, pool in pools.items() if pool]
    if mode == "hybrid" and overflow is not None:
        options.append(f"--prefill-overflow-tokens={overflow}")
    return [f"--mode={mode}", *options]


def make_loads(args: argparse.Namespace) -> Iterator[tuple[str, list[Job]]]:
    """Each load's name and requests; one at a time is not among them."""

    def jobs(count: int, rate: float, prompt: int, seed: int) -> list[Job]:
        lengths = str(prompt), str(args.output_tokens)
        return make_jobs(count, "poisson", rate, *lengths, args.vocabulary, seed)

    yield "burst", jobs(args.requests, 0.0, args.prompt_tokens, 1)
    for rate in args.rates:
        yield f"{rate:g} requests/s", jobs(args.requests, rate, args.prompt_tokens, 2)
    for rate in args.mixed_rates:
        long = round(args.requests * LONG_SHARE)
        mixed = jobs(args.requests - long, rate * (1 - LONG_SHARE), args.prompt_tokens, 3)
        mixed += jobs(long, rate * LONG_SHARE, args.long_prompt_tokens, 4)
        yield f"{rate:g} requests/s, some long", sorted(mixed, key=lambda job: job.arrival)


def ask_one_at_a_time(url: str, jobs: Sequence[Job]) -> tuple[list[float], list[list[int]]]:
    """How long each request took, and its tokens."""
    seconds, tokens = [], []
    with Client(url) as client:
        for job in jobs:
            started = time.perf_counter()
            sampling = SAMPLING | {"max_tokens": job.max_tokens, "seed": job.seed}
            tokens.append(client.generate(job.prompt, **sampling).output_ids)
            seconds.append(time.perf_counter() - started)
    return seconds, tokens


def load(server: BackgroundServer, jobs: list[Job], args: argparse.Namespace) -> dict[str, Any]:
    before = server.metrics()
    outcomes, seconds = asyncio.run(run_load(server.url, jobs, args.deadline, SAMPLING))
    after = server.metrics()
    counted = {key: after.get(name, 0.0) - before.get(name, 0.0) for key, name in WATCHED.items()}
    row = summarise(outcomes, seconds, {}) | counted
    if any(len(job.prompt) > args.prompt_tokens for job in jobs):
        row |= {"short requests": latency_of_short(outcomes, args.prompt_tokens)}
    return row


def latency_of_short(outcomes: Sequence[Outcome], prompt_tokens: int) -> dict[str, float]:
    return spread([each.latency for each in outcomes if each.prompt_tokens <= prompt_tokens])


def measure(server: BackgroundServer, args: argparse.Namespace) -> dict[str, Any]:
    loads = dict(make_loads(args))
    burst = loads["burst"]
    answer_warm_up(server.url, burst[:4], args.deadline, SAMPLING)
    seconds, tokens = ask_one_at_a_time(server.url, burst[:ALONE])
    rows = {name: load(server, jobs, args) for name, jobs in loads.items()}
    return {"one at a time": spread(seconds), "tokens": tokens, "loads": rows}


def table(results: dict[str, dict[str, Any]]) -> str:
    first = next(iter(results.values()))
    lines = []
    for mode, result in results.items():
        same = sum(one == other for one, other in zip(result["tokens"], first["tokens"]))
        alone = result["one at a time"]["p50"]
        lines.append(
            f"{mode}: one at a time p50 {alone:.3f} s, {same} of {len(first['tokens'])} answers as "
            "in the first mode"
        )
        for name, row in result["loads"].items():
            lines.append(f"  {name}: {row_text(row)}")
    return "\n".join(lines)


def row_text(row: dict[str, Any]) -> str:
    def quantiles(metric: str, *shares: str) -> str:
        return "/".join(f"{row[metric].get(share, float('nan')):.3f}" for share in shares)

    text = (
        f"{row['failed']} failed, {row['output tokens/s']:.0f} tokens/s, latency p50/p90/p99 "
        f"{quantiles('latency', 'p50', 'p90', 'p99')} s, first text p90 "
        f"{quantiles('first text', 'p90')} s, between commits p99/max "
        f"{quantiles('between commits', 'p99', 'max')} s"
    )
    if "short requests" in row:
        text += f", of short ones {quantiles('short requests', 'p50', 'p90', 'p99')} s"
    if row["blocks"] and row["overflows"]:
        text += f", {100 * row['overflows'] / row['blocks']:.0f} % of the prefills overflowed"
    if row["pull seconds"]:
        text += f", pulled at {row['pulled bytes'] / row['pull seconds'] / 1e9:.3g} GB/s"
    return text


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--gpus", default="", help="numbers with commas between")
    parser.add_argument("--serve", default="", help="further options of `sangam serve`, as one")
    parser.add_argument("--prefill-overflow-tokens", type=int, help="of the mode hybrid")
    parser.add_argument("--requests", type=int, default=64, help="of each load")
    parser.add_argument("--rates", type=float, nargs="*", default=[2.0, 4.0])
    parser.add_argument("--mixed-rates", type=float, nargs="*", default=[2.0])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--long-prompt-tokens", type=int, default=3584)
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=256, help="random ids are below it")
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds for a request")
    parser.add_argument("--output", type=Path, required=True, help="folder")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    gpus = args.gpus.split(",") if args.gpus else []
    results = {}
    for mode in args.modes:
        options = ["--model", args.model, *shlex.split(args.serve)]
        options += mode_options(mode, gpus, args.prefill_overflow_tokens)
        with background_server(options, args.output / f"{mode}.log", START_SECONDS) as server:
            results[mode] = measure(server, args)
        (args.output / "modes.json").write_text(json.dumps(results, indent=1))
    print(table(results))


if __name__ == "__main__":
    main()
