"""Mixed requests, and what `sangam generate` answers to them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from server.harness import EVERYTHING, TINY, Serving, run_sangam

REQUESTS = 200
WORDS = ("Add 4363 and 75.", "Sort these numbers: 26, 12, 62.", "Reverse the word house.")


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
    prompt: dict[str, Any] = {"text_input": draw.choice(WORDS)}
    if draw.random() < 0.8:
        prompt = {"input_ids": [draw.randrange(262) for _ in range(draw.randint(1, 120))]}
    return {"id": str(number), **prompt, "sampling_parameters": sampling}


def inputs_of(line: dict[str, Any], stream: bool) -> dict[str, Any]:
    prompt = {name: line[name] for name in ("input_ids", "text_input") if name in line}
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
    }


def generated(lines: list[dict[str, Any]], folder: Path, *options: str) -> list[dict[str, Any]]:
    """What `sangam generate` answers."""
    source, target = folder / "input.jsonl", folder / "output.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = ("--model", str(TINY), "--input", str(source), "--output", str(target))
    done = run_sangam("generate", *files, *options)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    for answer in answers:
        del answer["num_forwards"]
    return answers
