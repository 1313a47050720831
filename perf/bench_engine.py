"""Speed of the engine without a server: single iterations, one request, and a burst.

The workload W1 is a prompt of 512 tokens, 256 generated ones in blocks of 32, greedy, `quota`
(4 tokens a forward unless told otherwise), EOS ignored. Weights are random, which changes no
time, and `quota` fixes how many forwards a request takes.

    python perf/bench_engine.py --model perf/shapes/llada-8b --output llada.json
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from sangam_backend.config import EngineConfig, ModelConfig
from sangam_backend.engine import Engine
from sangam_backend.pages import PAGE_SIZE
from sangam_backend.plan import Row, StepPlan
from sangam_backend.prompt import Prompt
from sangam_backend.request import Request
from sangam_backend.rules import Commit, Count
from sangam_backend.runner import Launch

PROMPT, GENERATED, BLOCK = 512, 256, 32
DECODE_BATCHES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
PREFILL_LENGTHS = (256, 512, 768, 1024, 2048, 4096)
MIXED = ((1, 7), (2, 14))
BURST = 64
PROFILED = 4
REST_SECONDS = 0.3


@dataclass
class Work:
    """What an iteration must do, for achieved rates."""

    tokens: int
    logit_rows: int
    queries_times_keys: int
    keys: int

    @classmethod
    def of(cls, rows: list[Row]) -> Work:
        return cls(
            tokens=sum(row.num_tokens for row in rows),
            logit_rows=sum(row.block_length for row in rows),
            queries_times_keys=sum(row.num_tokens * row.sequence_length for row in rows),
            keys=sum(row.sequence_length for row in rows),
        )

    def flops(self, model: ModelConfig) -> int:
        attention = 4 * self.queries_times_keys * model.num_heads * model.head_dim
        layers = 2 * layer_weights(model) * self.tokens + model.num_layers * attention
        return layers + 2 * self.logit_rows * model.vocab_size * model.hidden_size

    def bytes(self, model: ModelConfig, itemsize: int) -> int:
        """The least that must be read: weights once, K/V once, and the logits both ways."""
        weights = layer_weights(model) + model.vocab_size * model.hidden_size
        kv = self.keys * model.kv_size_per_token
        return itemsize * (weights + kv + 2 * self.logit_rows * model.vocab_size)


def layer_weights(model: ModelConfig) -> int:
    qkv = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    layer = model.hidden_size * (qkv + model.hidden_size + 3 * model.intermediate_size)
    return model.num_layers * layer


@dataclass
class Gaps:
    """Records when the device begins and ends each iteration."""

    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def watch(self, engine: Engine) -> None:
        launch = engine.runner.launch

        def marked(plan: StepPlan) -> Launch:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            launched = launch(plan)
            end.record()
            self.marks.append((begin, end))
            return launched

        engine.runner.launch = marked  # type: ignore[method-assign]

    def idle_ms(self) -> list[float]:
        torch.cuda.synchronize()
        pairs = zip(self.marks, self.marks[1:])
        return [earlier[1].elapsed_time(later[0]) for earlier, later in pairs]


def make_request(engine: Engine, prompt: int, generated: int, quota: int, seed: int) -> Request:
    rng = random.Random(seed)
    vocab = engine.frontend.model.mask_token_id
    sampling = {
        "max_tokens": generated,
        "block_length": BLOCK,
        "unmasking": "quota",
        "tokens_per_step": quota,
        "ignore_eos": True,
    }
    ids = [rng.randrange(vocab) for _ in range(prompt)]
    return engine.frontend.new_request(str(seed), Prompt(input_ids=ids), sampling, stream=True)


def run_requests(engine: Engine, requests: list[Request]) -> tuple[float, list[float]]:
    """Seconds to the end of all, and of each."""
    started = time.perf_counter()
    ends = []
    for request in requests:
        engine.submit(request)
    while not engine.is_idle:
        for _, output in engine.step():
            if output.finish_reason is not None:
                ends.append(time.perf_counter() - started)
    return time.perf_counter() - started, ends


@contextmanager
def admitted(engine: Engine, prefills: int, decodes: int, length: int) -> Iterator[list[Row]]:
    """Rows of requests that hold pages, set up by hand so that an iteration can be repeated."""
    rows = []
    for slot in range(prefills + decodes):
        request = make_request(engine, length - GENERATED // 2, GENERATED // 2, 4, seed=slot)
        pages = engine.pages.allocate(-(-request.sequence_length // PAGE_SIZE))
        assert pages is not None, "the KV pool is too small for this part"
        request.slot, request.pages = slot, pages
        engine.runner.state.admit(request)
        row = Row(
            request=request,
            slot=slot,
            prefill=slot < prefills,
            block=0,
            block_start=request.block_start,
            block_length=BLOCK,
            sequence_length=request.sequence_length,
            forward=0,
            commit=Commit(Count.QUOTA, 1.0),
        )
        rows.append(row)
    try:
        yield rows
    finally:
        for row in rows:
            engine.pages.free(row.request.pages)


def time_iteration(engine: Engine, rows: list[Row], repeats: int) -> float:
    """Milliseconds of an iteration, the host launching ahead; the median of five short rounds.

    The device rests between rounds: under minutes of such load its clocks fall by some 10 %, which
    the bursts of requests show.
    """
    plan = StepPlan(rows, [])
    for _ in range(3):
        engine.runner.launch(plan).wait()
    rounds = []
    for _ in range(5):
        time.sleep(REST_SECONDS)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        launches = [engine.runner.launch(plan) for _ in range(repeats)]
        end.record()
        end.synchronize()
        launches[-1].wait()
        rounds.append(begin.elapsed_time(end) / repeats)
    return float(statistics.median(rounds))


def iteration_parts(engine: Engine) -> dict[str, tuple[int, int, int]]:
    """name -> prefills, decodes, sequence length"""
    batch = engine.config.max_batch_size
    parts = {f"decode {n}": (0, n, PROMPT + GENERATED) for n in DECODE_BATCHES if n <= batch}
    parts |= {f"prefill {length}": (1, 0, length) for length in PREFILL_LENGTHS}
    for prefills, decodes in MIXED:
        name = f"mixed {prefills}x768 + {decodes}x{BLOCK}"
        parts[name] = (prefills, decodes, PROMPT + GENERATED)
    return parts


def bench_iteration(engine: Engine, prefills: int, decodes: int, length: int) -> dict[str, Any]:
    with admitted(engine, prefills, decodes, length) as rows:
        ms = time_iteration(engine, rows, repeats=4 if prefills else 12)
        return rates(engine, Work.of(rows), ms)


def rates(engine: Engine, work: Work, ms: float) -> dict[str, Any]:
    model = engine.frontend.model
    itemsize = engine.runner.pool.element_size()
    return {
        "ms": round(ms, 3),
        "TFLOP/s": round(work.flops(model) / ms / 1e9, 1),
        "GB/s": round(work.bytes(model, itemsize) / ms / 1e6, 1),
    }


def bench_requests(engine: Engine, count: int, quota: int) -> dict[str, Any]:
    requests = [make_request(engine, PROMPT, GENERATED, quota, seed) for seed in range(count)]
    seconds, ends = run_requests(engine, requests)
    return {
        "seconds": round(seconds, 4),
        "tokens/s": round(count * GENERATED / seconds, 1),
        "forwards": sum(request.num_forwards for request in requests) // count,
        "latency p50": round(statistics.median(ends), 4),
        "latency max": round(max(ends), 4),
        "in vain": engine.scheduler.vain_rows,
    }


def bench_gaps(engine: Engine) -> dict[str, Any]:
    """Idle time of the device between the iterations of one request."""
    gaps = Gaps()
    gaps.watch(engine)
    run_requests(engine, [make_request(engine, PROMPT, GENERATED, 4, seed=0)])
    idle = gaps.idle_ms()
    del engine.runner.launch
    return {
        "idle ms mean": round(statistics.mean(idle), 4),
        "idle ms p50": round(statistics.median(idle), 4),
        "idle ms max": round(max(idle), 4),
    }


def environment(device: torch.device) -> dict[str, Any]:
    git = ["git", "rev-parse", "--verify", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True)
    cpu = platform.processor() or platform.machine()
    return {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else cpu,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": commit.stdout.strip() if commit.returncode == 0 else None,
    }


def profile(engine: Engine, parts: dict[str, tuple[int, int, int]], top: int = 14) -> None:
    """Prints for each part which kernels its time goes to."""
    for name, shape in parts.items():
        with admitted(engine, *shape) as rows:
            time_iteration(engine, rows, repeats=2)
            with torch.profiler.profile() as recorded:
                launches = [engine.runner.launch(StepPlan(rows, [])) for _ in range(PROFILED)]
                launches[-1].wait()
                torch.cuda.synchronize()
        kernels = [e for e in recorded.key_averages() if e.self_device_time_total > 0]
        kernels.sort(key=lambda event: -event.self_device_time_total)
        total = sum(event.self_device_time_total for event in kernels)
        print(f"\n{name}: {total / PROFILED / 1000:.3f} ms in kernels")
        for event in kernels[:top]:
            ms = event.self_device_time_total / PROFILED / 1000
            each = event.self_device_time_total / event.count
            print(f"{ms:8.3f} ms {event.count // PROFILED:5} x {each:8.1f} us  {event.key[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a checkpoint, or perf/shapes/...")
    parser.add_argument("--output", type=Path, help="JSON of all results")
    parser.add_argument("--profile", action="store_true", help="kernels of the iterations only")
    parser.add_argument("--only", default="", help="parts whose name this regular expression finds")
    parser.add_argument("--max-batch-size", type=int, default=BURST)
    parser.add_argument("--max-tokens-per-iteration", type=int, default=2048)
    parser.add_argument("--kv-cache-tokens", type=int, default=100_000)
    parser.add_argument("--attention", choices=["auto", "sdpa"], default="auto")
    for lever in ("cuda-graphs", "fused-ops", "overlap", "tuned-products"):
        parser.add_argument(f"--{lever}", action=argparse.BooleanOptionalAction, default=True)
    args = vars(parser.parse_args())
    output, profiled, only = (args.pop(name) for name in ("output", "profile", "only"))

    config = EngineConfig(load_format="dummy", **args)
    started = time.perf_counter()
    engine = Engine(config)
    results: dict[str, Any] = {
        "settings": args,
        "environment": environment(engine.runner.device),
        "start": engine.describe() | {"seconds": round(time.perf_counter() - started, 1)},
    }
    print(json.dumps(results, indent=1), flush=True)
    if profiled:
        chosen = {name: v for name, v in iteration_parts(engine).items() if re.search(only, name)}
        profile(engine, chosen)
        return
    run_requests(engine, [make_request(engine, 64, 64, 4, seed=0) for _ in range(3)])

    parts: dict[str, Callable[[], dict[str, Any]]] = {
        name: lambda shape=shape: bench_iteration(engine, *shape)  # type: ignore[misc]
        for name, shape in iteration_parts(engine).items()
    }
    parts["gaps"] = lambda: bench_gaps(engine)
    for quota in (4, 2, 1):
        parts[f"one request, quota {quota}"] = lambda q=quota: bench_requests(engine, 1, q)  # type: ignore[misc]
    for quota in (4, 2, 1):
        parts[f"burst of {BURST}, quota {quota}"] = lambda q=quota: bench_requests(engine, BURST, q)  # type: ignore[misc]
    table = {}
    for name in tqdm([name for name in parts if re.search(only, name)], unit="part"):
        table[name] = parts[name]()
        tqdm.write(f"{name:26} " + "  ".join(f"{k} {v}" for k, v in table[name].items()))
    results["parts"] = table
    results["padding share"] = engine.runner.padding_share
    if engine.runner.device.type == "cuda":
        results["peak GB"] = round(torch.cuda.max_memory_reserved() / 1e9, 2)
    print(f"padding share {results['padding share']}, peak {results.get('peak GB')} GB")
    if output:
        output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
