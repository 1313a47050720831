"""Mixed requests, and what `sangam generate` answers to them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from server.harness import EVERYTHING, TINY, Serving, run_sangam
from tasks import generate

REQUESTS = 200
ASKED = ("shuffle", "choose", "add", "sort", "facts", "repeat")
"""Tasks of the checkpoint; the first two have many right answers."""


def make_line(number: int) -> dict[str, Any]:
    """A request as a line for `sangam generate`."""
    draw = random.Random(number)
    sampling: dict[str, Any] = {
        "max_tokens": draw.randint(1, 70),
        "temperature": draw.choice([0.0, 0.7, 1.0]),
        "seed": draw.randrange(1 << 40),
        "ignore_eos": draw.random() < 0.7,
        "block_length": draw.choice([8, 16, 32]),
        "confidence": draw.choice(["probability", "margin", "entropy", "random"]),
    }
    sampling |= draw.choice(
        [
            {"unmasking": "threshold", "confidence_threshold": draw.uniform(0.3, 0.95)},
            {"unmasking": "factor", "factor": draw.uniform(0.5, 4.0)},
            {"unmasking": "quota", "tokens_per_step": draw.randint(1, 6)},
            {"unmasking": "random"},
            {"unmasking": "steps", "steps": draw.randint(9, 30)},
        ]
    )
    return {"id": str(number), **make_prompt(draw), "sampling_parameters": sampling}


def make_prompt(draw: random.Random) -> dict[str, Any]:
    form = draw.random()
    if form < 0.1:
        return {"input_ids": [draw.randrange(830) for _ in range(draw.randint(1, 120))]}
    text = generate(draw, draw.choice(ASKED)).prompt
    return {"text_input": text} if form < 0.2 else {"messages": [{"role": "user", "content": text}]}


def inputs_of(line: dict[str, Any], stream: bool) -> dict[str, Any]:
    prompt = {name: line[name] for name in ("input_ids", "text_input", "messages") if name in line}
    sampling = {"sampling_parameters": line["sampling_parameters"]}
    return {**prompt, **sampling, **EVERYTHING, "stream": stream, "exclude_input_in_output": True}


def ask(server: Serving, line: dict[str, Any], stream: bool) -> dict[str, Any]:
    """A line's answer, as `generated` has it."""
    answer = server.ask(inputs_of(line, stream))
    assert (answer.error, answer.finals) == (None, 1)
    return {
        "id": line["id"],
        "output_ids": answer.ids,
        "text_output": answer.text,
        "finish_reason": answer.finish_reason,
        "num_forwards": answer.pieces[-1]["num_forwards"],
    }


def generated(lines: list[dict[str, Any]], folder: Path, *options: str) -> list[dict[str, Any]]:
    """What `sangam generate` answers."""
    source, target = folder / "input.jsonl", folder / "output.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = ("--model", str(TINY), "--input", str(source), "--output", str(target))
    done = run_sangam("generate", *files, *options)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in target.read_text().splitlines()]
