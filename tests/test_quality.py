"""Quality does not fall: a small part of perf/quality.py, with its floor."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import quality
from tasks import Item

from sangam_backend.engine import Engine
from sangam_backend.plan import Row
from sangam_backend.request import Output, Request

CHECKPOINTS = Path(__file__).parent.parent / "checkpoints"


class Floor(NamedTuple):
    plain: float
    hard: float


TASKS = ("add", "sort", "reverse", "facts", "multiply", "choose")
ITEMS = 8
BLOCK_LENGTH = 8
FLOORS = {
    "tiny-llada": {
        "quota 1": Floor(0.95, 0.85),
        "threshold 0.9": Floor(0.95, 0.85),
        "quota 4": Floor(0.9, 0.4),
    },
}

Rows = dict[str, dict[str, Any]]


def open_engine(model: str, block_length: int) -> Engine:
    return quality.open_engine(quality.Setup(CHECKPOINTS / model, "dual", block_length, "cpu"))


def load_items(per_task: int) -> list[Item]:
    return [item for item in quality.load_items(per_task) if item.task in TASKS]


@pytest.fixture(scope="module", params=FLOORS)
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def rows(model: str) -> Rows:
    engine, items = open_engine(model, BLOCK_LENGTH), load_items(ITEMS)
    return {rule: quality.measure(engine, items, quality.RULES[rule]) for rule in FLOORS[model]}


def test_accuracy_keeps_its_floor(model: str, rows: Rows) -> None:
    for rule, floor in FLOORS[model].items():
        row = rows[rule]
        assert set(row["accuracy"]) == set(TASKS)
        assert row["plain"] >= floor.plain, row
        assert row["hard"] >= floor.hard, row


def test_speed_and_its_price_are_counted(rows: Rows) -> None:
    exact, fast, careless = rows["quota 1"], rows["threshold 0.9"], rows["quota 4"]
    assert exact["tokens per forward"] <= 1
    assert fast["tokens per forward"] > 2
    assert exact["forwards"] > fast["forwards"] >= fast["prefills"] >= 1
    assert exact["accuracy"]["choose"] > careless["accuracy"]["choose"] + 0.5


@pytest.mark.parametrize("rule", ["quota 4", "threshold 0.9"])
def test_prefills_are_those_that_were_of_use(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the next block is prefilled before the end of the answer is known."""
    engine, items = open_engine("tiny-llada", 8), load_items(2)
    scheduler, apply = engine.scheduler, engine.scheduler.apply
    ran: list[Request] = []

    def watched(row: Row, tokens: list[int]) -> Output | None:
        vain = scheduler.vain_rows
        output = apply(row, tokens)
        if row.prefill and scheduler.vain_rows == vain:
            ran.append(row.request)
        return output

    monkeypatch.setattr(scheduler, "apply", watched)
    for answer in quality.answer(engine, items, quality.RULES[rule]):
        assert answer.prefills == ran.count(answer.request)


@pytest.mark.parametrize(("max_tokens", "ending"), [(64, 1), (4, 0)])
def test_only_a_token_that_ended_the_answer_counts(max_tokens: int, ending: int) -> None:
    engine, items = open_engine("tiny-llada", 32), load_items(1)
    for answer in quality.answer(engine, items, {"max_tokens": max_tokens}):
        assert answer.tokens == len(answer.output.ids) + ending


def test_stopping_at_the_end_changes_no_answer() -> None:
    setup = quality.Setup(CHECKPOINTS / "tiny-llada", "dual", 32, "cpu")
    result = quality.measure_eos(setup, load_items(2))
    assert result["answers"] == 2 * len(TASKS)
    assert result["answers changed"] == 0
    assert result["stopping"]["forwards"] < result["ignoring EOS"]["forwards"]


def test_plot(model: str, rows: Rows, tmp_path: Path) -> None:
    about = {"model": model, "cache": "dual", "block length": BLOCK_LENGTH}
    target = tmp_path / "quality.png"
    quality.plot([about | {"rule": rule} | row for rule, row in rows.items()], target)
    assert target.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("answer", "canvas"), [(1, 32), (28, 32), (29, 64), (60, 64), (61, 96)])
def test_canvas_length(answer: int, canvas: int) -> None:
    assert quality.canvas_length(answer) == canvas
