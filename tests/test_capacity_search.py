"""The search finds the rate at which rules begin to fail, and never measures a trial twice."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench_serve import samples
from capacity_search import (
    Configuration,
    Result,
    Rule,
    Trial,
    cached_trial,
    double_and_bisect,
    find_capacity,
    plot,
    read_configurations,
    table,
)
from workload import Job, at_rate

P90 = Rule("latency", 0.9, 2.0)
SETTINGS = Configuration("tiny", "model", (P90,), prompt_lengths="uniform:1:9", seconds=10.0)


def make_trial(rate: float, latency: float, failed: int = 0) -> Trial:
    summary = {"failed": failed, "requests": 10, "output tokens/s": 100 * rate}
    return Trial(rate, {}, summary, dict.fromkeys(samples([]), [latency] * 10))


@pytest.mark.parametrize("limit", [0.2, 0.9, 1.0, 5.0, 37.2, 1000.0])
@pytest.mark.parametrize("tolerance", [0.01, 0.1])
def test_doubling_and_bisection(limit: float, tolerance: float) -> None:
    asked: list[float] = []

    def passes(rate: float) -> bool:
        asked.append(rate)
        return rate <= limit

    found = double_and_bisect(passes, start=1.0, lowest=0.1, tolerance=tolerance)
    assert found <= limit < found * (1 + tolerance)
    assert len(set(asked)) == len(asked) < 25
    assert max(asked) <= 2 * max(limit, 1)


def test_no_rate_passes() -> None:
    asked: list[float] = []

    def refuse(rate: float) -> bool:
        asked.append(rate)
        return False

    assert double_and_bisect(refuse, 8.0, 1.0, 0.05) == 0
    assert asked == [8, 4, 2, 1]


def test_rates_of_a_list() -> None:
    configuration = dataclasses.replace(SETTINGS, rates=(4.0, 1.0, 2.0, 8.0))
    result = find_capacity(configuration, lambda rate, _: make_trial(rate, rate / 2))
    assert result.capacity == 4
    assert [trial.rate for trial in result.trials] == [1, 2, 4, 8, 8]
    assert find_capacity(configuration, lambda rate, _: make_trial(rate, 9.0)).capacity == 0


def test_a_rate_passes_when_one_of_its_trials_does() -> None:
    asked: list[tuple[float, int]] = []

    def run_trial(rate: float, attempt: int) -> Trial:
        asked.append((rate, attempt))
        return make_trial(rate, 9.0 if rate > 2 or attempt == 0 else 1.0)

    result = find_capacity(dataclasses.replace(SETTINGS, rates=(1.0, 2.0, 4.0)), run_trial)
    assert result.capacity == 2
    assert asked == [(rate, attempt) for rate in (1.0, 2.0, 4.0) for attempt in (0, 1)]
    once = dataclasses.replace(SETTINGS, rates=(1.0, 2.0, 4.0), attempts=1)
    assert find_capacity(once, run_trial).capacity == 0


def test_all_rules_must_hold_and_no_request_fail() -> None:
    first = Rule("first text", 0.5, 1.0)
    trial = make_trial(4.0, latency=2.0)
    assert trial.meets([P90])
    assert not trial.meets([P90, first])
    assert not make_trial(4.0, latency=1.0, failed=1).meets([P90])
    spread = dataclasses.replace(trial, values={"latency": [1.0] * 9 + [3.0]})
    assert spread.meets([P90])
    assert not spread.meets([Rule("latency", 0.91, 2.0)])
    assert not spread.meets([Rule("latency", 1.0, 2.0)])
    # A metric that no request has is not one that is kept.
    assert not dataclasses.replace(trial, values={"latency": []}).meets([P90])


@dataclasses.dataclass
class Meter:
    """Counts what is measured."""

    measured: list[tuple[float, list[Job]]] = dataclasses.field(default_factory=list)

    def __call__(self, rate: float, jobs: list[Job]) -> Trial:
        self.measured.append((rate, jobs))
        return make_trial(rate, 0.3 * rate)


def test_a_search_goes_on_where_it_stopped(tmp_path: Path) -> None:
    def run(measure: Callable[[float, list[Job]], Trial]) -> Result:
        return find_capacity(
            SETTINGS,
            lambda rate, attempt: cached_trial(SETTINGS, tmp_path, rate, attempt, measure),
        )

    first, second, third = Meter(), Meter(), Meter()

    def interrupted(rate: float, jobs: list[Job]) -> Trial:
        if len(first.measured) == 3:
            raise KeyboardInterrupt
        return first(rate, jobs)

    with pytest.raises(KeyboardInterrupt):
        run(interrupted)
    assert len(list(tmp_path.iterdir())) == 3
    result = run(second)
    assert result.capacity == pytest.approx(2 / 0.3, rel=0.05)
    assert {rate for rate, _ in first.measured}.isdisjoint(rate for rate, _ in second.measured)
    assert run(third) == result
    assert not third.measured


@pytest.mark.parametrize(
    ("change", "again"),
    [
        ({"rules": (Rule("latency", 0.5, 1.0),)}, False),
        ({"name": "other", "tolerance": 0.2, "start": 2.0}, False),
        ({"serve": "--mode hybrid"}, True),
        ({"model": "other"}, True),
        ({"sampling": {"unmasking": "quota"}}, True),
        ({"deadline": 5.0}, True),
        ({"seed": 1}, True),
        ({"seconds": 20.0}, True),
        ({"output_lengths": "8"}, True),
    ],
)
def test_what_makes_another_trial(change: dict[str, Any], again: bool, tmp_path: Path) -> None:
    meter = Meter()
    for configuration in (SETTINGS, dataclasses.replace(SETTINGS, **change)):
        cached_trial(configuration, tmp_path, 4.0, 0, meter)
    assert len(meter.measured) == 1 + again


def test_a_changed_trace_makes_another_trial(tmp_path: Path) -> None:
    trace, meter = tmp_path / "trace.jsonl", Meter()
    configuration = dataclasses.replace(SETTINGS, trace=str(trace))
    for length in (8, 9, 8):
        lines = [{"arrival": n, "prompt_tokens": 3, "max_tokens": length} for n in range(5)]
        trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
        cached_trial(configuration, tmp_path / "trials", 4.0, 0, meter)
    assert [jobs[0].max_tokens for _, jobs in meter.measured] == [8, 9]


def test_another_rate_only_scales_the_arrivals() -> None:
    slow, fast = SETTINGS.requests(2.0), SETTINGS.requests(4.0)
    assert (len(slow), len(fast)) == (20, 40)
    for one, two in zip(slow, fast):
        assert one == dataclasses.replace(two, arrival=one.arrival)
        assert one.arrival == pytest.approx(2 * two.arrival)


def test_a_trace_is_repeated_at_a_rate() -> None:
    jobs = [Job(arrival, [number], 8, number) for number, arrival in enumerate((5.0, 6.0, 9.0))]
    made = at_rate(jobs, rate=4.0, count=7)
    assert [job.prompt for job in made] == [[0], [1], [2], [0], [1], [2], [0]]
    assert [job.arrival for job in made] == [0, 0.125, 0.5, 0.75, 0.875, 1.25, 1.5]
    for wrong in ([], jobs[:1], [jobs[0]] * 3):
        with pytest.raises(ValueError, match="at once"):
            at_rate(wrong, 4.0, 7)


FILE = """
common:
  model: checkpoint
  rules: [{metric: latency, quantile: 0.9, seconds: 2}]
  output_lengths: 64
configurations:
  plain:
  hybrid: {serve: --mode hybrid, rates: [1, 2], output_lengths: 32}
"""


def test_configurations_are_read(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(FILE)
    plain, hybrid = read_configurations(path)
    assert (plain.name, plain.rules, plain.rates, plain.serve) == ("plain", (P90,), (), "")
    assert (hybrid.model, hybrid.rates, hybrid.serve) == ("checkpoint", (1, 2), "--mode hybrid")
    assert [each.requests(1.0)[0].max_tokens for each in (plain, hybrid)] == [64, 32]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("quantile: 0.9", "quantile: 90", "plain: quantile is 90, must be above 0 and at most 1"),
        ("metric: latency", "metric: speed", "metric is 'speed', must be one of first text,"),
        ("seconds: 2}", "seconds: -1}", "seconds is -1, must be a number above 0"),
        ("rates: [1, 2]", "rates: [1, 0.001]", "hybrid: rate is 0.001, at least 0.01667"),
        ("rates: [1, 2]", "tolerance: fine", "tolerance is 'fine', must be a number"),
        ("rates: [1, 2]", "trace: nowhere.jsonl", "nowhere.jsonl"),
        ("rates: [1, 2]", "sampeling: {}", "sampeling"),
        ("output_lengths: 64", "output_lengths: many:1", "lengths are 'many:1'"),
        ("  rules: [{metric: latency, quantile: 0.9, seconds: 2}]\n", "", "rules are missing"),
        ("configurations:", "jobs:", "no mapping `configurations`"),
    ],
)
def test_mistakes_in_the_file(old: str, new: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(FILE.replace(old, new))
    with pytest.raises(ValueError, match=r"file\.yaml") as raised:
        read_configurations(path)
    assert message in str(raised.value)


def test_table_and_plot(tmp_path: Path) -> None:
    trials = [make_trial(1.0, 0.5), make_trial(2.0, 1.5), make_trial(4.0, math.nan, failed=10)]
    results = [Result(SETTINGS, 2.0, trials)]
    other = dataclasses.replace(SETTINGS, name="other", rules=(Rule("first text", 0.5, 0.1),))
    results.append(Result(other, 0.0, trials))
    _, first, second = table(results).splitlines()
    assert first.split()[:5] == ["tiny", "2", "4", "200.0", "3"]
    assert "latency p90 1.5 of 2 s" in first
    assert second.split() == ["other", "0", "1", "0.0", "3"]
    plot(tmp_path / "plot.svg", results)
    assert (tmp_path / "plot.svg").stat().st_size > 10_000
