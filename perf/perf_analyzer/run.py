"""Runs NVIDIA's perf_analyzer on a server in each mode, with each form of prompt.

    python perf/perf_analyzer/run.py --model CHECKPOINT --output analysis --kv-cache-tokens 50000

perf_analyzer is the executable that PERF_ANALYZER names, or the one on PATH. Options not listed
in --help go to `sangam serve`. Times come from the exported profiles, over all responses of a
request: what perf_analyzer itself prints as latency ends with the first one. genai-perf (0.0.16;
it needs perf_analyzer on PATH) runs too when it is on PATH.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from sangam_backend.background import background_server

INPUTS = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.json"))}
MODES = ("colocated", "disaggregated", "hybrid")
START_SECONDS = 600.0
NANOSECONDS = 1e-9


class Row(NamedTuple):
    """Times in seconds."""

    mode: str
    input: str
    concurrency: int
    rate: float
    """Requests/s."""
    latency_p50: float
    latency_p99: float
    first_p50: float
    first_p99: float


def find_perf_analyzer() -> str | None:
    return os.environ.get("PERF_ANALYZER") or shutil.which("perf_analyzer")


def analyze(binary: str, url: str, source: Path, load: tuple[int, int], profile: Path) -> None:
    """Writes a profile of so many requests, so many at once.

    Raises:
        SystemExit: perf_analyzer failed; the message has its output.
    """
    requests, concurrency = load
    command = [binary, "-m", "sangam", "-i", "grpc", "-u", url, "--async", "--streaming"]
    command += [f"--request-count={requests}", f"--concurrency-range={concurrency}"]
    command += [f"--input-data={source}", f"--profile-export-file={profile}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        sys.exit(f"perf_analyzer ended with {done.returncode}:\n{done.stdout[-2000:]}")


def read_profile(path: Path) -> list[tuple[float, float, float]]:
    """Of each request when it was sent, first answered and ended, in seconds of one clock."""
    (experiment,) = json.loads(path.read_text())["experiments"]
    return [
        (
            request["timestamp"] * NANOSECONDS,
            request["response_timestamps"][0] * NANOSECONDS,
            request["response_timestamps"][-1] * NANOSECONDS,
        )
        for request in experiment["requests"]
    ]


def make_row(
    mode: str, name: str, concurrency: int, times: list[tuple[float, float, float]]
) -> Row:
    seconds = max(end for _, _, end in times) - min(sent for sent, _, _ in times)
    latency = percentiles([end - sent for sent, _, end in times])
    first = percentiles([answered - sent for sent, answered, _ in times])
    return Row(mode, name, concurrency, len(times) / seconds, *latency, *first)


def percentiles(values: list[float]) -> tuple[float, float]:
    """The 50th and the 99th."""
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[98]


def table(rows: list[Row]) -> str:
    lines = [
        "mode           input      at once  requests/s  latency p50     p99  first p50     p99"
    ]
    for row in rows:
        lines.append(
            f"{row.mode:14} {row.input:10} {row.concurrency:7} {row.rate:11.2f} "
            f"{row.latency_p50:10.3f} s {row.latency_p99:5.3f} s {row.first_p50:8.3f} s "
            f"{row.first_p99:5.3f} s"
        )
    return "\n".join(lines)


def run_genai_perf(url: str, tokenizer: str, load: tuple[int, int], folder: Path) -> None:
    """Sends synthetic prompts as to Triton's vLLM backend; its own table goes to stderr."""
    requests, concurrency = load
    command = ["genai-perf", "profile", "-m", "sangam", "--url", url, "--streaming"]
    command += ["--endpoint-type", "kserve", "--backend", "vllm", "--tokenizer", tokenizer]
    command += ["--synthetic-input-tokens-mean", "128", "--output-tokens-mean", "64"]
    command += ["--request-count", str(requests), "--concurrency", str(concurrency)]
    subprocess.run([*command, "--artifact-dir", str(folder)], stdout=sys.stderr, check=True)


def analyze_mode(
    mode: str, binary: str, args: argparse.Namespace, serve: list[str]
) -> Iterator[Row]:
    options = [f"--model={args.model}", f"--mode={mode}", *serve]
    with background_server(options, args.output / f"{mode}.log", START_SECONDS) as server:
        for name in args.inputs:
            for concurrency in args.concurrencies:
                profile = args.output / f"{mode}-{name}-{concurrency}.json"
                analyze(binary, server.url, INPUTS[name], (args.requests, concurrency), profile)
                yield make_row(mode, name, concurrency, read_profile(profile))
        if shutil.which("genai-perf"):
            for concurrency in args.concurrencies:
                folder = args.output / f"{mode}-genai-perf-{concurrency}"
                run_genai_perf(server.url, args.model, (args.requests, concurrency), folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="checkpoint directory or hub id")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--inputs", nargs="+", choices=list(INPUTS), default=list(INPUTS))
    parser.add_argument("--concurrencies", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--requests", type=int, default=200, help="of each measurement, at least 2")
    parser.add_argument("--output", type=Path, required=True, help="folder")
    args, serve = parser.parse_known_args()
    binary = find_perf_analyzer()
    if binary is None:
        sys.exit("perf_analyzer: neither PERF_ANALYZER is set nor is it on PATH")
    args.output.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    total = len(args.modes) * len(args.inputs) * len(args.concurrencies)
    with tqdm(total=total, unit="measurement") as bar:
        for mode in args.modes:
            for row in analyze_mode(mode, binary, args, serve):
                rows.append(row)
                bar.update()
    print(table(rows))


if __name__ == "__main__":
    main()
