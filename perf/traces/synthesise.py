"""Writes chat.jsonl and summarisation.jsonl, the synthetic traces. README.md says what they are.

python perf/traces/synthesise.py perf/traces
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from typing import NamedTuple

REQUESTS = 200
RATE = 1.0
"""Requests/s; the load generators scale it."""
SEED = 0


class Lengths(NamedTuple):
    """A log-normal distribution of tokens, cut at both ends."""

    median: int
    sigma: float
    """The standard deviation of the logarithm."""
    shortest: int
    longest: int

    def draw(self, rng: random.Random) -> int:
        drawn = round(rng.lognormvariate(math.log(self.median), self.sigma))
        return min(max(drawn, self.shortest), self.longest)


class Shape(NamedTuple):
    prompts: Lengths
    answers: Lengths


SHAPES = {
    "chat": Shape(Lengths(64, 1.2, 4, 1500), Lengths(160, 0.7, 8, 512)),
    "summarisation": Shape(Lengths(900, 0.35, 256, 1500), Lengths(96, 0.4, 32, 256)),
}


def synthesise(name: str) -> str:
    """The lines of a trace; the same ones at each call."""
    rng = random.Random(f"{name} {SEED}")
    shape, arrival, lines = SHAPES[name], 0.0, []
    for _ in range(REQUESTS):
        line = {
            "arrival": round(arrival, 3),
            "prompt_tokens": shape.prompts.draw(rng),
            "max_tokens": shape.answers.draw(rng),
        }
        lines.append(json.dumps(line) + "\n")
        arrival += rng.expovariate(RATE)
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    for name in SHAPES:
        (args.folder / f"{name}.jsonl").write_text(synthesise(name))


if __name__ == "__main__":
    main()
