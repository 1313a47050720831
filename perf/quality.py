"""Accuracy against speed for every caching and unmasking choice, through the engine.

Each choice answers the same held-out items, whose answers can be checked exactly.

    python perf/quality.py run --items 100 --output quality.json
    python perf/quality.py plot quality.json --output quality.svg
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from bench_engine import environment
from tqdm import tqdm

from sangam_backend.config import Cache, EngineConfig
from sangam_backend.device import pick_device
from sangam_backend.engine import Engine
from sangam_backend.prompt import Prompt
from sangam_backend.request import FinishReason, Output, Request, RequestError

CHECKPOINTS = Path(__file__).parent.parent / "checkpoints"
sys.path.insert(0, str(CHECKPOINTS))

from tasks import TASKS, Item, held_out_items  # noqa: E402

CACHES: tuple[Cache, ...] = ("none", "prefix", "dual")
BLOCK_LENGTHS = (8, 16, 32)
RULES: dict[str, dict[str, Any]] = {
    "steps": {"unmasking": "steps"},
    **{f"quota {n}": {"unmasking": "quota", "tokens_per_step": n} for n in (1, 2, 3, 4)},
    **{
        f"threshold {value}": {"unmasking": "threshold", "confidence_threshold": value}
        for value in (0.95, 0.9, 0.8, 0.7)
    },
    **{f"factor {value}": {"unmasking": "factor", "factor": value} for value in (0.5, 1.0)},
}
"""`steps` is the published schedule with a forward for each token, `quota 1` commits the surest
token of each forward: the slow exact loops."""
CANVAS_STEP = 32
MARGIN = 4
"""Tokens that a canvas has beyond the answer, at least."""
EOS_RULE = "threshold 0.9"
EOS_CANVAS = 256
"""What a client gets that names no max_tokens."""
WARM_UP_ITEMS = 8


class Setup(NamedTuple):
    """What one engine is started for."""

    model: Path
    cache: Cache
    block_length: int
    device: str = "auto"


class Answer(NamedTuple):
    item: Item
    request: Request
    output: Output

    @property
    def tokens(self) -> int:
        """Those up to and with the one that ends the answer."""
        return len(self.output.ids) + (self.output.finish_reason is FinishReason.STOP)

    @property
    def prefills(self) -> int:
        """One a block, up to the block in which the answer ended. What ran in vain is left out."""
        params = self.request.params
        return min(self.request.prefix // params.block_length + 1, params.num_blocks)


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
            # The host bounds models as small as these: few, large iterations.
            max_batch_size=128,
            max_tokens_per_iteration=1 << 15,
            # Random noise of the start's timing must not change an answer.
            tuned_products=False,
        )
    )


def answer(engine: Engine, items: list[Item], sampling: dict[str, Any]) -> list[Answer]:
    """Answers all items, as many at once as the engine batches.

    The canvas fits each answer unless `sampling` has max_tokens.
    """
    asked: dict[Request, Item] = {}
    tokenizer = engine.frontend.tokenizer
    assert tokenizer is not None
    for item in items:
        prompt = Prompt(messages=[{"role": "user", "content": item.prompt}])
        length = canvas_length(len(tokenizer.encode(item.answer)))
        options = {"max_tokens": length} | sampling
        request = engine.frontend.new_request("", prompt, options, stream=False)
        asked[request] = item
        engine.submit(request)
    answers = []
    while not engine.is_idle:
        answers += [Answer(asked[request], request, output) for request, output in engine.step()]
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
    forwards = [request.num_forwards for _, request, _ in answers]
    whole = engine.config.cache == "none"
    return {
        "accuracy": accuracy,
        "plain": group_accuracy(accuracy, hard=False),
        "hard": group_accuracy(accuracy, hard=True),
        "tokens per forward": round(sum(a.tokens for a in answers) / sum(forwards), 3),
        "forwards": round(mean(forwards), 2),
        "prefills": round(mean(forwards if whole else [a.prefills for a in answers]), 2),
        "seconds": round(seconds, 2),
    }


def group_accuracy(accuracy: dict[str, float], hard: bool) -> float:
    chosen = [value for task, value in accuracy.items() if TASKS[task].hard == hard]
    return round(mean(chosen), 4) if chosen else 0.0


def warm_up(engine: Engine, items: list[Item]) -> None:
    """Keeps what only the first iterations do, such as compiling kernels, out of the times."""
    answer(engine, items[:: -(-len(items) // WARM_UP_ITEMS)], RULES[EOS_RULE])


def measure_setup(setup: Setup, per_task: int, rules: list[str]) -> list[dict[str, Any]]:
    """All rules with one engine, one after the other, so that each has a time of its own."""
    engine = open_engine(setup)
    items = load_items(per_task)
    warm_up(engine, items)
    about = {
        "model": setup.model.name,
        "cache": setup.cache,
        "block length": setup.block_length,
    }
    return [about | {"rule": rule} | measure(engine, items, RULES[rule]) for rule in rules]


def measure_eos(setup: Setup, items: list[Item]) -> dict[str, Any]:
    """What it saves to stop at the end of an answer, which may not change it."""
    engine = open_engine(setup)
    warm_up(engine, items)
    stops = engine.frontend.model.stop_token_ids

    def run(ignore_eos: bool) -> tuple[dict[Item, list[int]], dict[str, float]]:
        options = RULES[EOS_RULE] | {"max_tokens": EOS_CANVAS, "ignore_eos": ignore_eos}
        started = time.perf_counter()
        answers = answer(engine, items, options)
        cost = {
            "seconds": round(time.perf_counter() - started, 2),
            "forwards": round(mean(request.num_forwards for _, request, _ in answers), 2),
            "prefills": round(mean(a.prefills for a in answers), 2),
        }
        return {item: until_stop(output.ids, stops) for item, _, output in answers}, cost

    stopped, cost_stopped = run(ignore_eos=False)
    full, cost_full = run(ignore_eos=True)
    return {
        "model": setup.model.name,
        "cache": setup.cache,
        "block length": setup.block_length,
        "rule": EOS_RULE,
        "max_tokens": EOS_CANVAS,
        "answers": len(stopped),
        "answers changed": sum(stopped[item] != full[item] for item in stopped),
        "stopping": cost_stopped,
        "ignoring EOS": cost_full,
    }


def until_stop(ids: list[int], stops: frozenset[int]) -> list[int]:
    return list(itertools.takewhile(lambda token: token not in stops, ids))


def _measure_job(setup: Setup, per_task: int, rules: list[str], threads: int) -> Any:
    torch.set_num_threads(threads)
    try:
        return measure_setup(setup, per_task, rules)
    except RequestError as error:
        # It cannot be pickled, and so would break the pool.
        raise RuntimeError(f"{setup.model}: {error}") from None


def run_all(
    setups: list[Setup], per_task: int, rules: list[str], processes: int
) -> Iterator[list[dict[str, Any]]]:
    """The rows of each setup, as they come."""
    threads = max(1, (os.cpu_count() or 1) // processes)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, spawn) as pool:
        jobs = [pool.submit(_measure_job, setup, per_task, rules, threads) for setup in setups]
        try:
            for job in tqdm(as_completed(jobs), total=len(jobs), unit="engine"):
                yield job.result()
        finally:
            pool.shutdown(cancel_futures=True)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "model        cache   block  rule            plain   hard  tok/fwd  forwards  prefills"
        "  seconds"
    ]
    for row in rows:
        lines.append(
            f"{row['model']:12} {row['cache']:7} {row['block length']:5}  {row['rule']:14} "
            f"{row['plain']:6.1%} {row['hard']:6.1%} {row['tokens per forward']:8.2f} "
            f"{row['forwards']:9.1f} {row['prefills']:9.1f} {row['seconds']:8.1f}"
        )
    return "\n".join(lines)


def place(row: dict[str, Any]) -> tuple[Any, ...]:
    order = list(RULES).index(row["rule"])
    return row["model"], CACHES.index(row["cache"]), row["block length"], order


def run(args: argparse.Namespace) -> None:
    setups = [
        Setup(model, cache, block_length, args.device)
        for model in args.models
        for cache in args.caches
        for block_length in args.block_lengths
    ]
    result: dict[str, Any] = {
        "environment": environment(pick_device(args.device)),
        "settings": {
            "items per task": args.items,
            "engines at once": args.jobs,
            "rules": {rule: RULES[rule] for rule in args.rules},
            "canvas": f"multiple of {CANVAS_STEP}, at least {MARGIN} more than the answer",
        },
        "rows": [],
        "eos": [],
    }

    def save() -> None:
        args.output.write_text(json.dumps(result, indent=1))

    # Written as it grows: a failure late in a sweep loses nothing.
    for rows in run_all(setups, args.items, args.rules, args.jobs):
        result["rows"] = sorted(result["rows"] + rows, key=place)
        save()
    print(table(result["rows"]))
    for model in tqdm(args.models, unit="model", desc="EOS"):
        setup = Setup(model, "dual", 32, args.device)
        result["eos"].append(measure_eos(setup, load_items(args.items)))
        save()
    print(json.dumps(result["eos"], indent=1))


def plot(rows: list[dict[str, Any]], target: Path) -> None:
    """One panel a model and kind of task; the colour is the cache, the marker the rule."""
    from matplotlib.figure import Figure

    models = sorted({row["model"] for row in rows})
    figure = Figure(figsize=(10, 4 * len(models) + 1), layout="constrained")
    panels = figure.subplots(len(models), 2, squeeze=False, sharex=True)
    for model, (plain, hard) in zip(models, panels):
        for panel, kind in ((plain, "plain"), (hard, "hard")):
            _draw(panel, [row for row in rows if row["model"] == model], kind)
            panel.set_title(f"{model}, {kind} tasks")
    for panel in panels[-1]:
        panel.set_xlabel("answer tokens per forward (size of the marker: block length)")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(CACHES))
    figure.savefig(target, dpi=150)


def _draw(panel: Any, rows: list[dict[str, Any]], kind: str) -> None:
    colors = dict(zip(CACHES, ("tab:gray", "tab:orange", "tab:blue")))
    markers = {"steps": "x", "quota": "o", "threshold": "^", "factor": "s"}
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
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set_ylabel("exact answers, %")
    panel.grid(alpha=0.3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    running = commands.add_parser("run", help="measure")
    running.set_defaults(command=run)
    both = [CHECKPOINTS / name for name in ("tiny-llada", "tiny-dream")]
    running.add_argument("--models", nargs="+", type=Path, default=both)
    running.add_argument("--caches", nargs="+", choices=CACHES, default=CACHES)
    running.add_argument("--block-lengths", nargs="+", type=int, default=BLOCK_LENGTHS)
    running.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    running.add_argument("--items", type=int, default=100, help="of each task")
    running.add_argument("--jobs", type=int, default=1, help="engines at once")
    running.add_argument("--device", default="auto")
    running.add_argument("--output", type=Path, required=True, help="JSON")
    plotting = commands.add_parser("plot", help="draw accuracy against tokens a forward")
    plotting.set_defaults(
        command=lambda args: plot(json.loads(args.input.read_text())["rows"], args.output)
    )
    plotting.add_argument("input", type=Path)
    plotting.add_argument("--output", type=Path, required=True, help="SVG or PNG")
    args = parser.parse_args()
    args.command(args)


if __name__ == "__main__":
    main()
