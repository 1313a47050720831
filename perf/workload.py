"""Requests of a load test: when they arrive, and how long they and their answers are."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Prompt = list[int] | list[dict[str, str]]
Lengths = Callable[[random.Random], int]


@dataclass(frozen=True, slots=True)
class Job:
    """One request."""

    arrival: float
    """Seconds after the start of the load."""
    prompt: Prompt
    """Token ids, or chat messages."""
    max_tokens: int
    seed: int


def parse_lengths(text: str, field: str = "max_tokens") -> Lengths:
    """`512`, `uniform:64:512`, `zipf:1.2:64:1024` (the shorter, the more often), or `trace:FILE`:
    the numbers that the lines of a trace have as `field`, in their order, again and again.
    """
    kind, *numbers = text.split(":")
    if kind == "trace" and numbers:
        recorded = itertools.cycle(_field_of_trace(Path(text.partition(":")[2]), field))
        return lambda rng: next(recorded)
    if not numbers:
        fixed = int(kind)
        return lambda rng: fixed
    if kind == "uniform" and len(numbers) == 2:
        low, high = map(int, numbers)
        return lambda rng: rng.randint(low, high)
    if kind == "zipf" and len(numbers) == 3:
        exponent, low, high = float(numbers[0]), int(numbers[1]), int(numbers[2])
        lengths = range(low, high + 1)
        weights = [(1 + length - low) ** -exponent for length in lengths]
        return lambda rng: rng.choices(lengths, weights)[0]
    raise ValueError(
        f"lengths are {text!r}, must be N, uniform:LOW:HIGH, zipf:EXPONENT:LOW:HIGH or trace:FILE"
    )


def gaps(kind: str, rate: float, rng: random.Random) -> Iterator[float]:
    """Seconds between arrivals: `poisson`, `static`, `gamma:CV` (CV 1 is Poisson), or the pattern
    of the arrivals in `trace:FILE`.
    """
    name, _, variation = kind.partition(":")
    if name == "trace" and variation:
        yield from gaps_at_rate(sorted(_field_of_trace(Path(variation), "arrival")), rate)
    while True:
        if name == "static":
            yield 1 / rate
        elif name == "poisson":
            yield rng.expovariate(rate)
        elif name == "gamma" and variation:
            shape = float(variation) ** -2
            yield rng.gammavariate(shape, 1 / (rate * shape))
        else:
            raise ValueError(
                f"arrivals are {kind!r}, must be poisson, static, gamma:CV or trace:FILE"
            )


def make_jobs(
    count: int,
    arrivals: str,
    rate: float,
    prompt_lengths: str,
    output_lengths: str,
    vocabulary: int,
    seed: int,
) -> list[Job]:
    """Random prompts; with a rate of 0 all arrive at once."""
    rng = random.Random(seed)
    prompt_length = parse_lengths(prompt_lengths, "prompt_tokens")
    output_length = parse_lengths(output_lengths, "max_tokens")
    waits = gaps(arrivals, rate, rng) if rate else iter(lambda: 0.0, None)
    jobs: list[Job] = []
    now = 0.0
    for number in range(count):
        prompt = [rng.randrange(vocabulary) for _ in range(prompt_length(rng))]
        jobs.append(Job(now, prompt, output_length(rng), seed + number))
        now += next(waits)
    return jobs


def read_trace(path: Path, vocabulary: int, seed: int, speed: float = 1.0) -> list[Job]:
    """A file of JSON lines: `arrival` in seconds, `max_tokens`, and one of `messages`, `input_ids`
    and `prompt_tokens` (a length, filled with random ids).

    Raises:
        ValueError: the message names the line.
    """
    rng = random.Random(seed)
    jobs = []
    for number, line in enumerate(path.read_text().splitlines()):
        try:
            entry: dict[str, Any] = json.loads(line)
            prompt = entry.get("messages") or entry.get("input_ids")
            if prompt is None:
                prompt = [rng.randrange(vocabulary) for _ in range(entry["prompt_tokens"])]
            arrival = float(entry.get("arrival", 0.0)) / speed
            jobs.append(Job(arrival, prompt, int(entry["max_tokens"]), seed + number))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number + 1}: {error!r}") from None
    return sorted(jobs, key=lambda job: job.arrival)


def at_rate(jobs: Sequence[Job], rate: float, count: int) -> list[Job]:
    """The first `count` requests of an endless repetition of a trace, which keeps the pattern of
    its arrivals but has `rate` of them a second.

    Raises:
        ValueError: fewer than two arrivals, or all at once: they have no pattern.
    """
    waits = gaps_at_rate([job.arrival for job in jobs], rate)
    arrivals = itertools.accumulate(waits, initial=0.0)
    return [
        dataclasses.replace(job, arrival=arrival)
        for job, arrival in zip(itertools.cycle(jobs), itertools.islice(arrivals, count))
    ]


def gaps_at_rate(arrivals: Sequence[float], rate: float) -> Iterator[float]:
    """Seconds between arrivals that keep a pattern, again and again, at `rate` a second.

    Raises:
        ValueError: fewer than two arrivals, or all at once: they have no pattern.
    """
    span = arrivals[-1] - arrivals[0] if arrivals else 0.0
    if not span:
        raise ValueError("all requests of the trace arrive at once, a rate needs their arrivals")
    scale = (len(arrivals) - 1) / (span * rate)
    between = [scale * (later - earlier) for earlier, later in itertools.pairwise(arrivals)]
    return itertools.cycle([*between, 1 / rate])


def _field_of_trace(path: Path, field: str) -> list[Any]:
    """A field of every line.

    Raises:
        ValueError: it is missing; the message names the line.
    """
    values = []
    for number, line in enumerate(path.read_text().splitlines()):
        entry = json.loads(line)
        if not isinstance(entry.get(field), int | float):
            raise ValueError(f"{path}, line {number + 1}: {field} is {entry.get(field)!r}")
        values.append(entry[field])
    return values
