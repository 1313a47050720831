"""`sangam generate`, as a user calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import goldens
import pytest

CHECKPOINTS = Path(__file__).parent.parent / "checkpoints"


def sangam(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sangam_backend.cli", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def generate(tmp_path: Path, model: Path, lines: list[Any], *options: str) -> list[dict[str, Any]]:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(f"{x if isinstance(x, str) else json.dumps(x)}\n" for x in lines))
    done = sangam("generate", "--model", model, "--input", source, "--output", target, *options)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in target.read_text().splitlines()]


QUESTIONS = {
    "Add 4363 and 75.": "The sum is 4438.",
    "Reverse the letters h o u s e.": "e s u o h",
    "Sort these numbers: 26, 12, 62.": "12, 26, 62",
    "Ray has 59 cards and gives away 57. How many cards now?": "Ray has 2 cards.",
}


@pytest.mark.parametrize("options", [(), ("--engine", "reference", "--cache", "none")])
def test_tiny_llada_answers(tmp_path: Path, options: tuple[str, ...]) -> None:
    sampling = {"max_tokens": 64}
    lines: list[Any] = [
        {"messages": [{"role": "user", "content": question}], "sampling_parameters": sampling}
        for question in QUESTIONS
    ]
    results = generate(tmp_path, CHECKPOINTS / "tiny-llada", lines, *options)
    for result, answer in zip(results, QUESTIONS.values(), strict=True):
        assert result["text_output"].endswith(answer)
        assert result["finish_reason"] == "stop"
        assert 0 < result["num_forwards"] < len(result["output_ids"])


def test_engine_and_reference_write_the_same_file(tmp_path: Path) -> None:
    case = next(c for c in goldens.read_cases("dream_tiny") if c["id"] == "D35")
    sampling = goldens.serving_sampling(case)
    lines = [
        {"id": "golden", "input_ids": case["prompt_ids"][0], "sampling_parameters": sampling},
        {"id": "short", "input_ids": [1, 2], "sampling_parameters": {"max_tokens": 5}},
    ]
    model = goldens.GOLDEN / "dream_tiny"
    results = generate(tmp_path, model, lines)
    assert results == generate(tmp_path, model, lines, "--engine", "reference")
    assert results == generate(tmp_path, model, lines, "--max-batch-size", "1")
    assert results[0] == {
        "id": "golden",
        "output_ids": case["generated_ids"][0],
        "text_output": "",
        "finish_reason": "length",
        "num_forwards": case["nfe"],
    }


def test_a_bad_line_fails_alone(tmp_path: Path) -> None:
    bad = [
        "not json",
        [1],
        {"id": "none"},
        {"id": "key", "input_ids": [1], "prompt": "x"},
        {"id": "type", "input_ids": "1"},
        {"id": "float", "input_ids": [1.5]},
        {"id": "range", "input_ids": [512]},
        {"id": "text", "text_input": "x"},
        {"id": "sampling", "input_ids": [1], "sampling_parameters": {"max_tokens": 0}},
    ]
    good = {"id": "good", "input_ids": [1, 2, 3], "sampling_parameters": {"max_tokens": 4}}
    for options in ((), ("--engine", "reference")):
        results = generate(tmp_path, goldens.GOLDEN / "llada_tiny", [*bad, good], *options)
        assert [set(result) for result in results[:-1]] == [{"id", "error"}] * len(bad)
        assert len(results[-1]["output_ids"]) == 4
        assert results[6]["error"] == "input_ids[0] is 512, must be an integer from 0 to 511"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "/nowhere"], "model is '/nowhere': no such directory"),
        (["--model", str(CHECKPOINTS)], "config.json: no such file"),
        (["--model", str(CHECKPOINTS / "tiny-llada"), "--device", "cuda:9"], "device is 'cuda:9'"),
        (["--model", str(CHECKPOINTS / "tiny-llada"), "--input", "/none"], "/none"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, options: list[str], message: str) -> None:
    (tmp_path / "in").touch()
    done = sangam("generate", "--input", tmp_path / "in", "--output", tmp_path / "out", *options)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.startswith("sangam: ")
    assert done.stderr.count("\n") == 1
