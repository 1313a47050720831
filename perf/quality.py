"""Accuracy against speed for every caching and unmasking choice, through the engine.

Each choice answers the same held-out items, whose answers can be checked exactly.

    python perf/quality.py run --items 100 --output quality.json
    python perf/quality.py plot quality.json --output quality.svg
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from sangam_backend.config import Cache, EngineConfig
from sangam_backend.engine import Engine
from sangam_backend.frontend import Prompt
from sangam_backend.request import Output, Request

CHECKPOINTS = Path(__file__).parent.parent / "checkpoints"
sys.path.insert(0, str(CHECKPOINTS))

from tasks import TASKS, Item, held_out_items  # noqa: E402

CACHES: tuple[Cache, ...] = ("none", "prefix", "dual")
BLOCK_LENGTHS = (8, 16, 32)
RULES: dict[str, dict[str, Any]] = {
    **{f"quota {n}": {"unmasking": "quota", "tokens_per_step": n} for n in (1, 2, 3, 4)},
    **{
        f"threshold {value}": {"unmasking": "threshold", "confidence_threshold": value}
        for value in (0.95, 0.9, 0.8, 0.7)
    },
    **{f"factor {value}": {"unmasking": "factor", "factor": value} for value in (0.5, 1.0)},
}
"""`quota 1` is the slow exact loop: one token a forward."""
CANVAS_STEP = 32
MARGIN = 4
"""Tokens that a canvas has beyond the answer, at least."""


class Setup(NamedTuple):
    """What one engine is started for."""

    model: Path
    cache: Cache
    block_length: int
    device: str = "auto"


def canvas_length(answer_tokens: int) -> int:
    """The canvas is an input of the model: the smallest multiple of 32 with a little room."""
    return -(-(answer_tokens + MARGIN) // CANVAS_STEP) * CANVAS_STEP


def load_items(per_task: int) -> list[Item]:
    return [item for task in TASKS for item in held_out_items(task, per_task)]


def open_engine(setup: Setup) -> Engine:
    return Engine(
        EngineConfig(
            model=str(setup.model),
            cache=setup.cache,
            block_length=setup.block_length,
            device=setup.device,
            # Random noise of the start's timing must not change an answer.
            tuned_products=False,
        )
    )


def answer(
    engine: Engine, items: list[Item], sampling: dict[str, Any]
) -> list[tuple[Item, Request, Output]]:
    """Answers all items, as many at once as the engine batches."""
    asked: dict[Request, Item] = {}
    tokenizer = engine.frontend.tokenizer
    assert tokenizer is not None
    for item in items:
        prompt = Prompt(messages=[{"role": "user", "content": item.prompt}])
        length = canvas_length(len(tokenizer.encode(item.answer)))
        options = sampling | {"max_tokens": length}
        request = engine.frontend.new_request("", prompt, options, stream=False)
        asked[request] = item
        engine.submit(request)
    answers = []
    while not engine.is_idle:
        answers += [(asked[request], request, output) for request, output in engine.step()]
    return answers


def measure(engine: Engine, items: list[Item], sampling: dict[str, Any]) -> dict[str, Any]:
    """Accuracy by task, and what the answers took."""
    started = time.perf_counter()
    answers = answer(engine, items, sampling)
    seconds = time.perf_counter() - started
    right: dict[str, list[bool]] = defaultdict(list)
    for item, _, output in answers:
        right[item.task].append(item.is_correct(output.text))
    accuracy = {task: round(mean(values), 4) for task, values in right.items()}
    requests = [request for _, request, _ in answers]
    forwards = [request.num_forwards for request in requests]
    prefills = forwards if engine.config.cache == "none" else [r.block + 1 for r in requests]
    # The token that ends an answer is committed too.
    tokens = sum(request.num_output_tokens + 1 for request in requests)
    return {
        "accuracy": accuracy,
        "plain": group_accuracy(accuracy, hard=False),
        "hard": group_accuracy(accuracy, hard=True),
        "tokens per forward": round(tokens / sum(forwards), 3),
        "forwards": round(mean(forwards), 2),
        "prefills": round(mean(prefills), 2),
        "seconds": round(seconds, 2),
    }


def group_accuracy(accuracy: dict[str, float], hard: bool) -> float:
    chosen = [value for task, value in accuracy.items() if TASKS[task].hard == hard]
    return round(mean(chosen), 4) if chosen else 0.0


def measure_setup(setup: Setup, per_task: int, rules: list[str]) -> list[dict[str, Any]]:
    """All rules with one engine, one after the other."""
    engine = open_engine(setup)
    items = load_items(per_task)
    return [
        {
            "model": setup.model.name,
            "cache": setup.cache,
            "block length": setup.block_length,
            "rule": rule,
        }
        | measure(engine, items, RULES[rule])
        for rule in rules
    ]


def measure_eos(setup: Setup, per_task: int, rule: str) -> dict[str, Any]:
    """What it saves to stop at the end of an answer, which may not change it."""
    engine = open_engine(setup)
    items = load_items(per_task)
    stops = engine.frontend.model.stop_token_ids

    def run(ignore_eos: bool) -> tuple[dict[tuple[str, str], list[int]], float, float]:
        started = time.perf_counter()
        answers = answer(engine, items, RULES[rule] | {"ignore_eos": ignore_eos})
        seconds = time.perf_counter() - started
        ids = {(i.prompt, i.answer): until_stop(output.ids, stops) for i, _, output in answers}
        return ids, seconds, mean(request.num_forwards for _, request, _ in answers)

    stopped, stopped_seconds, stopped_forwards = run(ignore_eos=False)
    full, full_seconds, full_forwards = run(ignore_eos=True)
    return {
        "model": setup.model.name,
        "rule": rule,
        "answers changed": sum(stopped[key] != full[key] for key in stopped),
        "seconds": [round(stopped_seconds, 2), round(full_seconds, 2)],
        "forwards": [round(stopped_forwards, 2), round(full_forwards, 2)],
    }


def until_stop(ids: list[int], stops: frozenset[int]) -> list[int]:
    end = next((index for index, token in enumerate(ids) if token in stops), len(ids))
    return ids[:end]


def _measure_job(job: tuple[Setup, int, list[str]]) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return measure_setup(*job)


def run_all(jobs: list[tuple[Setup, int, list[str]]], processes: int) -> Iterator[dict[str, Any]]:
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(processes) as pool, tqdm(total=len(jobs), unit="engine") as bar:
        for rows in pool.imap_unordered(_measure_job, jobs):
            bar.update()
            yield from rows


def environment(device: str) -> dict[str, Any]:
    cuda = torch.cuda.is_available() and device != "cpu"
    return {
        "device": torch.cuda.get_device_name() if cuda else platform.processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "model        cache   block  rule            plain   hard  tok/fwd  forwards  prefills"
    ]
    for row in rows:
        lines.append(
            f"{row['model']:12} {row['cache']:7} {row['block length']:5}  {row['rule']:14} "
            f"{row['plain']:6.1%} {row['hard']:6.1%} {row['tokens per forward']:8.2f} "
            f"{row['forwards']:9.1f} {row['prefills']:9.1f}"
        )
    return "\n".join(lines)


def run(args: argparse.Namespace) -> None:
    models = [Path(model) for model in args.models]
    setups = [
        Setup(model, cache, block_length, args.device)
        for model in models
        for cache in args.caches
        for block_length in args.block_lengths
    ]
    jobs = [(setup, args.items, args.rules) for setup in setups]
    rows = list(run_all(jobs, args.jobs))
    rows.sort(key=lambda row: (row["model"], row["cache"], row["block length"], row["rule"]))
    eos = [
        measure_eos(Setup(model, "dual", 32, args.device), args.items, "threshold 0.9")
        for model in models
    ]
    result = {
        "environment": environment(args.device),
        "items per task": args.items,
        "rows": rows,
        "eos": eos,
    }
    args.output.write_text(json.dumps(result, indent=1))
    print(table(rows))
    print(json.dumps(eos, indent=1))


def plot(args: argparse.Namespace) -> None:
    """One panel a model and kind of task; the colour is the cache, the marker the rule."""
    from matplotlib.figure import Figure

    rows = json.loads(args.input.read_text())["rows"]
    models = sorted({row["model"] for row in rows})
    figure = Figure(figsize=(10, 3.6 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), 2, squeeze=False, sharex=True)
    for model, (plain, hard) in zip(models, panels):
        for panel, kind in ((plain, "plain"), (hard, "hard")):
            _draw(panel, [row for row in rows if row["model"] == model], kind)
            panel.set_title(f"{model}, {kind} tasks")
    panels[0][0].legend(fontsize="x-small", ncols=2)
    figure.savefig(args.output)


def _draw(panel: Any, rows: list[dict[str, Any]], kind: str) -> None:
    colors = dict(zip(CACHES, ("tab:gray", "tab:orange", "tab:blue")))
    markers = {"quota": "o", "threshold": "^", "factor": "s"}
    labelled = set()
    for row in rows:
        family = row["rule"].split()[0]
        label = f"{row['cache']}, {family}"
        panel.scatter(
            row["tokens per forward"],
            100 * row[kind],
            s=row["block length"],
            color=colors[row["cache"]],
            marker=markers[family],
            alpha=0.7,
            label=label if label not in labelled else None,
        )
        labelled.add(label)
    panel.set_xscale("log", base=2)
    panel.set_xlabel("answer tokens per forward (size of the marker: block length)")
    panel.set_ylabel("exact answers, %")
    panel.grid(alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run", help="measure")
    running.set_defaults(run=run)
    both = [str(CHECKPOINTS / name) for name in ("tiny-llada", "tiny-dream")]
    running.add_argument("--models", nargs="+", default=both)
    running.add_argument("--caches", nargs="+", choices=CACHES, default=CACHES)
    running.add_argument("--block-lengths", nargs="+", type=int, default=BLOCK_LENGTHS)
    running.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    running.add_argument("--items", type=int, default=100, help="of each task")
    running.add_argument("--jobs", type=int, default=1, help="engines at once")
    running.add_argument("--device", default="auto")
    running.add_argument("--output", type=Path, required=True, help="JSON")
    plotting = commands.add_parser("plot", help="draw accuracy against tokens a forward")
    plotting.set_defaults(run=plot)
    plotting.add_argument("input", type=Path)
    plotting.add_argument("--output", type=Path, required=True, help="SVG or PNG")
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
