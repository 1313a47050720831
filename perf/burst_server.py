"""A burst of the workload W1 through a running server, streamed over gRPC.

python perf/burst_server.py --url localhost:8001 --vocab 126336
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from typing import Any, NamedTuple

from sangam_client import AsyncClient

PROMPT, GENERATED = 512, 256
SAMPLING: dict[str, Any] = {
    "max_tokens": GENERATED,
    "block_length": 32,
    "unmasking": "quota",
    "tokens_per_step": 4,
    "ignore_eos": True,
}


class Timing(NamedTuple):
    """Seconds from the start of the burst."""

    first_text: float
    end: float


async def ask(client: AsyncClient, prompt: list[int], started: float) -> Timing:
    first, tokens = 0.0, 0
    async for chunk in client.stream(prompt, **SAMPLING):
        first = first or time.perf_counter() - started
        tokens += len(chunk.output_ids)
    assert tokens == GENERATED, f"{tokens} tokens came, {GENERATED} were asked for"
    return Timing(first, time.perf_counter() - started)


async def burst(url: str, requests: int, vocab: int) -> dict[str, float]:
    rng = random.Random(0)
    prompts = [[rng.randrange(vocab) for _ in range(PROMPT)] for _ in range(requests)]
    async with AsyncClient(url) as client:
        started = time.perf_counter()
        timings = await asyncio.gather(*(ask(client, prompt, started) for prompt in prompts))
        seconds = time.perf_counter() - started
    return {
        "requests": requests,
        "seconds": round(seconds, 3),
        "tokens/s": round(requests * GENERATED / seconds, 1),
        "first text p50": round(statistics.median(t.first_text for t in timings), 3),
        "latency p50": round(statistics.median(t.end for t in timings), 3),
        "latency max": round(max(t.end for t in timings), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--vocab", type=int, required=True, help="prompt ids are below it")
    args = parser.parse_args()
    for requests in (1, *args.requests):  # the first warms the connection up
        print(json.dumps(asyncio.run(burst(args.url, requests, args.vocab))), flush=True)


if __name__ == "__main__":
    main()
