"""Quality does not fall: a small part of perf/quality.py, with its floor."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import quality

CHECKPOINTS = Path(__file__).parent.parent / "checkpoints"
TASKS = ("subtract", "sort", "repeat")
ITEMS = 8
FLOORS = {"quota 1": 0.95, "threshold 0.9": 0.9}


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    engine = quality.open_engine(quality.Setup(CHECKPOINTS / "tiny-llada", "dual", 32, "cpu"))
    items = [item for item in quality.load_items(ITEMS) if item.task in TASKS]
    return {rule: quality.measure(engine, items, quality.RULES[rule]) for rule in FLOORS}


def test_accuracy_keeps_its_floor(rows: dict[str, dict[str, Any]]) -> None:
    for rule, floor in FLOORS.items():
        assert set(rows[rule]["accuracy"]) == set(TASKS)
        assert rows[rule]["plain"] >= floor, rows[rule]


def test_speed_is_counted(rows: dict[str, dict[str, Any]]) -> None:
    exact, fast = rows["quota 1"], rows["threshold 0.9"]
    assert exact["tokens per forward"] <= 1
    assert fast["tokens per forward"] > 2
    assert exact["forwards"] > fast["forwards"] >= fast["prefills"] >= 1


def test_plot(rows: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    about = {"model": "tiny-llada", "cache": "dual", "block length": 32}
    measured = [about | {"rule": rule} | row for rule, row in rows.items()]
    source, target = tmp_path / "quality.json", tmp_path / "quality.svg"
    source.write_text(json.dumps({"rows": measured}))
    quality.plot(argparse.Namespace(input=source, output=target))
    assert "tiny-llada, hard tasks" in target.read_text() or target.stat().st_size > 10_000


@pytest.mark.parametrize(("answer", "canvas"), [(1, 32), (28, 32), (29, 64), (60, 64), (61, 96)])
def test_canvas_length(answer: int, canvas: int) -> None:
    assert quality.canvas_length(answer) == canvas
