"""Requests of a load test: when they arrive, and how long they and their answers are."""

from __future__ import annotations

import dataclasses
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


def parse_lengths(text: str) -> Lengths:
    """`512`, `uniform:64:512`, or `zipf:1.2:64:1024` (the shorter, the more often)."""
    kind, *numbers = text.split(":")
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
    raise ValueError(f"lengths are {text!r}, must be N, uniform:LOW:HIGH or zipf:EXPONENT:LOW:HIGH")


def gaps(kind: str, rate: float, rng: random.Random) -> Iterator[float]:
    """Seconds between arrivals: `poisson`, `static`, or `gamma:CV` (CV 1 is Poisson)."""
    name, _, variation = kind.partition(":")
    while True:
        if name == "static":
            yield 1 / rate
        elif name == "poisson":
            yield rng.expovariate(rate)
        elif name == "gamma" and variation:
            shape = float(variation) ** -2
            yield rng.gammavariate(shape, 1 / (rate * shape))
        else:
            raise ValueError(f"arrivals are {kind!r}, must be poisson, static or gamma:CV")


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
    prompt_length, output_length = map(parse_lengths, (prompt_lengths, output_lengths))
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
    span = jobs[-1].arrival - jobs[0].arrival if jobs else 0.0
    if not span:
        raise ValueError("all requests of the trace arrive at once, a rate needs their arrivals")
    speed = rate * span / (len(jobs) - 1)
    repeated = []
    for number in range(count):
        turn, place = divmod(number, len(jobs))
        job = jobs[place]
        arrival = turn * len(jobs) / rate + (job.arrival - jobs[0].arrival) / speed
        repeated.append(dataclasses.replace(job, arrival=arrival))
    return repeated
