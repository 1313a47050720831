"""Traces: the committed ones are what the generator makes, and public files become right ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from traces import prepare, synthesise
from workload import read_trace

from sangam_backend.text import Tokenizer

ROOT = Path(__file__).parents[1]
TRACES = ROOT / "perf" / "traces"
TINY = ROOT / "checkpoints" / "tiny-llada"
NAMES = ("chat", "summarisation")
HUMAN = {"from": "human", "value": "Say ABC."}
MODEL = {"from": "gpt", "value": "ABC"}


def encode(text: str) -> list[int]:
    tokenizer = Tokenizer.load(TINY, "llada")
    assert tokenizer is not None
    return tokenizer.encode(text)


def run(main: Callable[[], None], *arguments: str | Path) -> None:
    with mock.patch.object(sys, "argv", ["script", *map(str, arguments)]):
        main()


def run_prepare(kind: str, content: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    source, target = folder / "source", folder / "trace.jsonl"
    source.write_text(content)
    run(prepare.main, kind, source, "--model", TINY, "--output", target, *options)
    return [json.loads(line) for line in target.read_text().splitlines()]


def test_the_committed_traces_are_generated(tmp_path: Path) -> None:
    run(synthesise.main, tmp_path)
    for name in NAMES:
        committed = (TRACES / f"{name}.jsonl").read_bytes()
        assert (tmp_path / f"{name}.jsonl").read_bytes() == committed


@pytest.mark.parametrize("name", NAMES)
def test_the_committed_traces_fit_the_tiny_checkpoints(name: str) -> None:
    jobs = read_trace(TRACES / f"{name}.jsonl", vocabulary=256, seed=0)
    assert len(jobs) == 200
    assert max(len(job.prompt) for job in jobs) <= 1500
    assert max(len(job.prompt) + job.max_tokens for job in jobs) <= 2048 - 32
    assert 150 < jobs[-1].arrival < 250


def test_sharegpt(tmp_path: Path) -> None:
    talks = [
        [HUMAN, MODEL, HUMAN],
        [MODEL, HUMAN],
        [HUMAN],
        [],
        [HUMAN, {"from": "gpt", "value": ""}],
        [{"from": "human", "value": "long " * 100}, MODEL],
        [HUMAN, {"from": "gpt", "value": "long " * 100}],
        [{"from": "human", "value": "\ud83d"}, MODEL],
    ]
    content = json.dumps([{"id": "x", "conversations": turns} for turns in talks])
    limits = ("--max-prompt-tokens", "60", "--max-answer-tokens", "20")
    entries = run_prepare("sharegpt", content, tmp_path, *limits)
    prompts = {entry["messages"][0]["content"]: entry for entry in entries}
    assert set(prompts) == {"Say ABC.", "?"}
    answer_tokens = len(encode(MODEL["value"]))
    assert [entry["max_tokens"] for entry in entries] == [answer_tokens] * 2
    longer = len(encode("Say ABC.")) - len(encode("?"))
    assert prompts["Say ABC."]["prompt_tokens"] - prompts["?"]["prompt_tokens"] == longer > 0
    assert prompts["?"]["prompt_tokens"] > 1
    assert [entry["arrival"] for entry in entries] == [0, 0]


def test_arxiv(tmp_path: Path) -> None:
    texts = [("short article", "one"), ("word " * 400, "second"), ("anything", "long " * 300)]
    lines = [json.dumps({"article": article, "abstract": text}) for article, text in texts]
    entries = run_prepare("arxiv", "\n".join(lines), tmp_path, "--max-prompt-tokens", "300")
    short, long = (len(encode(text)) for text in ("one", "second"))
    by_length = {entry["max_tokens"]: entry for entry in entries}
    assert set(by_length) == {short, long}
    assert by_length[long]["prompt_tokens"] == 300
    (message,) = by_length[long]["messages"]
    assert message["role"] == "user"
    assert (prepare.INSTRUCTION + "word " * 400).startswith(message["content"])
    assert by_length[short]["messages"][0]["content"].endswith("short article")


def test_arrivals_and_the_number_of_requests(tmp_path: Path) -> None:
    talks = [[HUMAN, MODEL | {"value": "A" * n}] for n in range(1, 401)]
    content = json.dumps([{"id": "x", "conversations": turns} for turns in talks])
    entries = run_prepare("sharegpt", content, tmp_path, "--requests", "300", "--rate", "5")
    assert len(entries) == 300
    assert entries[-1]["arrival"] == pytest.approx(299 / 5, rel=0.2)
    # Drawn at random, not the first ones.
    assert max(entry["max_tokens"] for entry in entries) > 350
    assert read_trace(tmp_path / "trace.jsonl", 256, 0)[7].prompt == entries[7]["messages"]


@pytest.mark.parametrize("kind", ["sharegpt", "arxiv"])
def test_another_file_is_refused(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run_prepare(kind, '{"text": "a"}', tmp_path)
    assert f"is not a {kind} file" in capsys.readouterr().err
    assert not (tmp_path / "trace.jsonl").exists()
