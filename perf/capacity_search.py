"""The highest rate at which a server keeps all its promises, for several configurations.

    python perf/capacity_search.py perf/capacity.yaml --output capacity

The file names configurations (the fields of Configuration; `common` holds those that they share).
Each gets a server of its own, which trials load at one rate after the other. A trial passes when
no request failed or ran out of time and every rule holds; a rate passes when one of its trials
does, since what else the machine does can only slow a trial down.

The folder keeps the trials: a search that was interrupted goes on where it stopped, and other
rules over the same trials cost nothing. Take a new one for another machine or version.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from bench_serve import START_SECONDS, answer_warm_up, quantile, run_load, samples, summarise
from workload import Job, at_rate, make_jobs, read_trace

from sangam_backend.background import BackgroundServer, background_server

METRICS = tuple(samples([]))


@dataclass(frozen=True, slots=True)
class Rule:
    """A quantile of a metric that may be no more than some seconds."""

    metric: str
    quantile: float
    seconds: float

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ValueError(f"metric is {self.metric!r}, must be one of {', '.join(METRICS)}")
        if not 0 < self.quantile <= 1:
            raise ValueError(f"quantile is {self.quantile!r}, must be above 0 and at most 1")
        _check_positive("seconds", self.seconds)

    @property
    def name(self) -> str:
        return f"{self.metric} p{100 * self.quantile:g}"


@dataclass(frozen=True, slots=True)
class Trial:
    """What a load at one rate did."""

    rate: float
    """Requests/s."""
    settings: dict[str, Any]
    summary: dict[str, Any]
    values: dict[str, list[float]]
    """By metric, in seconds."""

    def value(self, rule: Rule) -> float:
        """NaN when no request has the metric: every one failed, say."""
        return quantile(self.values[rule.metric], rule.quantile)

    def meets(self, rules: Sequence[Rule]) -> bool:
        return not self.summary["failed"] and all(self.value(r) <= r.seconds for r in rules)


@dataclass(frozen=True, slots=True)
class Configuration:
    """A server, what is asked of it, and how its capacity is searched."""

    name: str
    model: str
    rules: tuple[Rule, ...]
    serve: str = ""
    """Further options of `sangam serve`."""
    sampling: dict[str, Any] = field(default_factory=dict)
    trace: str = ""
    """A file (see workload.read_trace) in place of the next three."""
    arrivals: str = "poisson"
    prompt_lengths: str = "512"
    output_lengths: str = "256"
    vocabulary: int = 256
    """Random ids are below it."""
    seed: int = 0
    seconds: float = 60.0
    """How long requests arrive in a trial."""
    deadline: float = 60.0
    """Seconds for a request; so a trial takes no more than both together."""
    warm_up: int = 4
    """Requests before those measured, in each trial."""
    attempts: int = 2
    """Trials that a rate may fail before it counts as failed."""
    rates: tuple[float, ...] = ()
    """Requests/s to try; none to double from `start`, then bisect to `tolerance`, a share."""
    start: float = 1.0
    tolerance: float = 0.05

    def __post_init__(self) -> None:
        if not self.rules:
            raise ValueError("rules are missing")
        for name in ("seconds", "deadline", "warm_up", "attempts", "tolerance"):
            _check_positive(name, getattr(self, name))
        for rate in (self.start, *self.rates):
            _check_positive("rate", rate)
            if rate < self.lowest:
                raise ValueError(f"rate is {rate!r}, at least {self.lowest:.4g} sends a request")

    @property
    def settings(self) -> dict[str, Any]:
        """What a trial depends on beside its requests."""
        names = ("model", "serve", "sampling", "deadline", "warm_up")
        return {name: getattr(self, name) for name in names}

    @property
    def lowest(self) -> float:
        """Below it a trial has no request."""
        return 1 / self.seconds

    def requests(self, rate: float) -> list[Job]:
        """The same for the same rate; for others only the times of arrival are scaled."""
        count = round(rate * self.seconds)
        if self.trace:
            return at_rate(read_trace(Path(self.trace), self.vocabulary, self.seed), rate, count)
        lengths = str(self.prompt_lengths), str(self.output_lengths)
        return make_jobs(count, self.arrivals, rate, *lengths, self.vocabulary, self.seed)


def _check_positive(name: str, value: Any) -> None:
    if not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"{name} is {value!r}, must be a number above 0")


def read_configurations(path: Path) -> list[Configuration]:
    """Reads the YAML file, and the traces it names.

    Raises:
        ValueError: the message names the configuration and the field.
    """
    document = yaml.safe_load(path.read_text())
    if not isinstance(document, dict) or not isinstance(document.get("configurations"), dict):
        raise ValueError(f"{path}: no mapping `configurations` of names to settings")
    made = []
    for name, own in document["configurations"].items():
        settings = (document.get("common") or {}) | (own or {}) | {"name": str(name)}
        try:
            settings["rules"] = tuple(Rule(**rule) for rule in settings.get("rules", ()))
            settings["rates"] = tuple(settings.get("rates", ()))
            configuration = Configuration(**settings)
            configuration.requests(configuration.start)  # so that a wrong workload is seen now
            made.append(configuration)
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, {name}: {error}") from None
    return made


def double_and_bisect(
    passes: Callable[[float], bool], start: float, lowest: float, tolerance: float
) -> float:
    """The highest rate seen to pass below one that does not, the two at most `tolerance` apart.

    Halves from `start` when that fails already; 0 when no rate from `lowest` on passes.
    """
    low, high, rate = 0.0, math.inf, start
    while high > low * (1 + tolerance) and rate >= lowest:
        if passes(rate):
            low = rate
        else:
            high = rate
        rate = 2 * low if high == math.inf else (low + high) / 2
    return low


class Result(NamedTuple):
    configuration: Configuration
    capacity: float
    """Requests/s; 0 when no trial passed."""
    trials: list[Trial]
    """By rate."""


def find_capacity(configuration: Configuration, run_trial: Callable[[float, int], Trial]) -> Result:
    """`run_trial` takes a rate and the number of the attempt."""
    trials: list[Trial] = []

    def passes(rate: float) -> bool:
        for attempt in range(configuration.attempts):
            trials.append(run_trial(rate, attempt))
            print(trial_line(configuration, trials[-1]), flush=True)
            if trials[-1].meets(configuration.rules):
                return True
        return False

    if configuration.rates:
        capacity = max(filter(passes, configuration.rates), default=0.0)
    else:
        capacity = double_and_bisect(
            passes, configuration.start, configuration.lowest, configuration.tolerance
        )
    return Result(configuration, capacity, sorted(trials, key=lambda trial: trial.rate))


def trial_line(configuration: Configuration, trial: Trial) -> str:
    verdict = "passes" if trial.meets(configuration.rules) else "fails"
    counts = f"{trial.summary['failed']} of {trial.summary['requests']} requests failed"
    values = "".join(f", {rule_text(rule, trial)}" for rule in configuration.rules)
    return f"{configuration.name}: {trial.rate:.4g} requests/s {verdict}: {counts}{values}"


def rule_text(rule: Rule, trial: Trial) -> str:
    return f"{rule.name} {trial.value(rule):.3g} of {rule.seconds:g} s"


def cached_trial(
    configuration: Configuration,
    folder: Path,
    rate: float,
    attempt: int,
    measure: Callable[[float, list[Job]], Trial],
) -> Trial:
    """Measures only what the folder does not hold. It never holds half a trial."""
    jobs = configuration.requests(rate)
    content = json.dumps(configuration.settings, sort_keys=True) + repr(jobs)
    key = hashlib.sha256(content.encode()).hexdigest()[:12]
    path = folder / f"{rate:.4g}-{key}-{attempt}.json"
    if not path.exists():
        text = json.dumps(asdict(measure(rate, jobs)))
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(text)
        part.rename(path)
    return Trial(**json.loads(path.read_text()))


class Bench:
    """Loads the server of a configuration, which starts when it is needed first."""

    def __init__(self, configuration: Configuration, folder: Path, servers: ExitStack) -> None:
        self._configuration = configuration
        self._log = folder / f"{configuration.name.replace('/', '-')}.log"
        self._servers = servers

    @cached_property
    def _server(self) -> BackgroundServer:
        options = ["--model", self._configuration.model, *shlex.split(self._configuration.serve)]
        server = background_server(options, self._log, START_SECONDS)
        return self._servers.enter_context(server)

    def measure(self, rate: float, jobs: list[Job]) -> Trial:
        """Raises SystemExit when the server, not the load, is at fault: that is no trial."""
        configuration, server = self._configuration, self._server
        load = configuration.deadline, configuration.sampling
        for outcome in answer_warm_up(server.url, jobs[: configuration.warm_up], *load):
            if outcome.error:
                sys.exit(f"{configuration.name}: the warm-up failed: {outcome.error}")
        outcomes, seconds = asyncio.run(run_load(server.url, jobs, *load))
        if server.process.poll() is not None:
            sys.exit(f"{configuration.name}: the server ended during a trial, see {self._log}")
        values = {
            metric: [round(value, 5) for value in measured if not math.isnan(value)]
            for metric, measured in samples(outcomes).items()
        }
        return Trial(rate, configuration.settings, summarise(outcomes, seconds, {}), values)


def table(results: Sequence[Result]) -> str:
    width = max(len(result.configuration.name) for result in results)
    lines = [f"{'':{width}}  requests/s  fails at  tokens/s  trials  at that rate"]
    for configuration, capacity, trials in results:
        passed = [trial for trial in trials if trial.meets(configuration.rules)]
        best = next((trial for trial in passed if trial.rate == capacity), None)
        above = min((trial.rate for trial in trials if trial.rate > capacity), default=math.nan)
        tokens = best.summary["output tokens/s"] if best else 0.0
        texts = [rule_text(rule, best) for rule in configuration.rules] if best else []
        lines.append(
            f"{configuration.name:{width}}  {capacity:10.4g}  {above:8.4g}  {tokens:8.1f}  "
            f"{len(trials):6}  {', '.join(texts)}"
        )
    return "\n".join(lines)


def plot(path: Path, results: Sequence[Result]) -> None:
    """A panel for each quantile that a rule names; trials that fail have a cross."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(rule.name for result in results for rule in result[0].rules))
    figure = Figure(figsize=(5 * len(names), 4), layout="constrained")
    panels = dict(zip(names, figure.subplots(1, len(names), squeeze=False)[0]))
    for index, (configuration, _, trials) in enumerate(results):
        color = f"C{index}"
        met = [trial.meets(configuration.rules) for trial in trials]
        rates = [trial.rate for trial in trials]
        for rule in configuration.rules:
            panel, values = panels[rule.name], [trial.value(rule) for trial in trials]
            panel.plot(rates, values, color=color, label=configuration.name)
            panel.axhline(rule.seconds, color=color, linestyle=":")
            for marker, kept in (("o", True), ("x", False)):
                chosen = [point for point, passed in zip(zip(rates, values), met) if passed == kept]
                panel.plot(*zip(*chosen, (math.nan, math.nan)), marker, color=color)
    for name, panel in panels.items():
        panel.set(xlabel="requests/s", ylabel=f"{name}, s", xscale="log", yscale="log")
        panel.legend()
    figure.savefig(path)


def search(configuration: Configuration, folder: Path) -> Result:
    with ExitStack() as servers:
        measure = Bench(configuration, folder, servers).measure

        def run_trial(rate: float, attempt: int) -> Trial:
            return cached_trial(configuration, folder / "trials", rate, attempt, measure)

        return find_capacity(configuration, run_trial)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("configurations", type=Path, help="YAML, see above and perf/capacity.yaml")
    parser.add_argument("--output", type=Path, required=True, help="folder")
    args = parser.parse_args()
    try:
        configurations = read_configurations(args.configurations)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SystemExit(f"capacity_search: {error}") from None
    args.output.mkdir(parents=True, exist_ok=True)
    results = [search(configuration, args.output) for configuration in configurations]
    (args.output / "table.txt").write_text(table(results) + "\n")
    plot(args.output / "latency.svg", results)
    print(table(results))


if __name__ == "__main__":
    main()
