"""Hours of mixed use in minutes: right answers, cancels, bad input, timeouts, and killed engines.

    python perf/soak.py --model checkpoints/tiny-llada --mode hybrid --seconds 600 --kill-every 20

Every finished answer is compared with the reference's. At the end nothing may be left: no request,
no page, no shared memory, and hardly more threads, files and memory than after a tenth of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sangam_client import AsyncClient, SangamError
from tqdm import tqdm

from sangam_backend.background import BackgroundServer, background_server
from sangam_backend.leftovers import memory_of
from sangam_backend.processes import children
from sangam_backend.scrape import HELD_REQUESTS

sys.path.insert(0, str(Path(__file__).parent.parent / "checkpoints"))

from tasks import TASKS, generate

START_SECONDS = 600.0
SETTLE_SECONDS = 60.0
LINES = 48
WARM_UP_SHARE = 0.1
SPARE = {"processes": 0, "threads": 8, "files": 8, "MB of Triton": 64, "MB of an engine": 128}
"""What may be there at the end beyond what was after the warm-up."""
HELD = (*HELD_REQUESTS, "sangam_kv_pages_used")


@dataclass
class Course:
    """What has happened so far."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    kills: int = 0


def make_line(rng: random.Random, number: int) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "max_tokens": rng.randint(1, 160),
        "unmasking": rng.choice(["threshold", "factor", "quota", "random", "steps"]),
        "temperature": rng.choice([0.0, 0.0, 0.7]),
        "tokens_per_step": rng.randint(1, 4),
        "block_length": rng.choice([8, 16, 32]),
        "ignore_eos": rng.random() < 0.5,
        "seed": number,
    }
    question = generate(rng, rng.choice(list(TASKS))).prompt
    messages = [{"role": "user", "content": question}]
    return {"id": str(number), "messages": messages, "sampling_parameters": sampling}


def answer_by_reference(model: str, lines: list[dict[str, Any]]) -> list[list[int]]:
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "lines", Path(folder) / "answers"
        source.write_text("".join(json.dumps(line) + "\n" for line in lines))
        command = [sys.executable, "-m", "sangam_backend.cli", "generate", "--engine=reference"]
        command += [f"--model={model}", f"--input={source}", f"--output={target}"]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        answers = map(json.loads, target.read_text().splitlines())
        return [answer["output_ids"] for answer in answers]


class Soak:
    def __init__(self, server: BackgroundServer, args: argparse.Namespace) -> None:
        self.server = server
        self.args = args
        self.rng = random.Random(args.seed)
        self.lines = [make_line(self.rng, number) for number in range(LINES)]
        self.expected = answer_by_reference(args.model, self.lines)
        self.course = Course()

    async def run(self, seconds: float, kill_every: float) -> None:
        """`kill_every` so many seconds an engine is killed; 0 kills none."""
        self.end = time.monotonic() + seconds
        async with AsyncClient(self.server.url) as client:
            workers = [self._work(client) for _ in range(self.args.workers)]
            await asyncio.gather(self._show(seconds), self._kill(kill_every), *workers)

    async def _work(self, client: AsyncClient) -> None:
        while time.monotonic() < self.end:
            number = self.rng.randrange(LINES)
            kind = self.rng.choices(["answer", "cancel", "timeout", "bad"], [7, 1, 1, 1])[0]
            try:
                outcome = await self._ask(client, number, kind)
            except SangamError as error:
                outcome = self._judge(kind, str(error))
            self.course.outcomes[outcome] += 1

    async def _ask(self, client: AsyncClient, number: int, kind: str) -> str:
        line = self.lines[number]
        sampling = dict(line["sampling_parameters"])
        if kind == "bad":
            sampling["max_tokens"] = -1
        timeout = 0.02 if kind == "timeout" else None
        ids: list[int] = []
        async for chunk in client.stream(line["messages"], timeout=timeout, **sampling):
            ids += chunk.output_ids
            if kind == "cancel":
                return "cancelled"
        if kind == "bad":
            self.course.faults.append("bad input was answered")
            return "bad"
        if ids != self.expected[number]:
            text = f"request {number} got {ids}, not {self.expected[number]}"
            self.course.differences.append(text)
            return "different"
        return "right"

    def _judge(self, kind: str, error: str) -> str:
        """An error that has its reason, or a fault."""
        code = re.search(r"\[([A-Z_]+)\]", error)
        allowed = {"bad": "INVALID_ARG", "timeout": "CANCELLED"}.get(kind)
        lost = self.course.kills and code is not None and code[1] == "UNAVAILABLE"
        if not lost and kind != "timeout" and (code is None or code[1] != allowed):
            self.course.faults.append(f"{kind}: {error}")
        return "lost" if lost else kind

    async def _kill(self, every: float) -> None:
        while every and time.monotonic() + 2 * every < self.end:
            await asyncio.sleep(every * self.rng.uniform(0.5, 1.5))
            if engines := self.engines():
                os.kill(self.rng.choice(engines), signal.SIGKILL)
                self.course.kills += 1

    async def _show(self, seconds: float) -> None:
        with tqdm(total=round(seconds), unit="s") as bar:
            while (left := self.end - time.monotonic()) > 0:
                bar.update(round(seconds - left) - bar.n)
                bar.set_postfix(self.course.outcomes, kills=self.course.kills)
                await asyncio.sleep(1)

    def stubs(self) -> list[int]:
        return [stub for triton in children(self.server.process.pid) for stub in children(triton)]

    def engines(self) -> list[int]:
        return [engine for stub in self.stubs() for engine in children(stub)]

    def usage(self) -> dict[str, int]:
        """Of Triton's own processes, which live through all of it, and of the largest engine."""
        engines, pids = self.engines(), [*children(self.server.process.pid), *self.stubs()]
        return {
            "processes": len(pids) + len(engines),
            "threads": sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in pids),
            "files": sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids),
            "MB of Triton": sum(map(resident_megabytes, pids)),
            "MB of an engine": max(map(resident_megabytes, engines), default=0),
        }

    def judge(self, before: dict[str, int], after: dict[str, int]) -> list[str]:
        """All faults, once the server has stopped."""
        faults = self.course.faults
        for name, spare in SPARE.items():
            if after[name] > before[name] + spare:
                faults.append(f"{name}: {before[name]} before, {after[name]} after")
        faults += [f"left behind: {path}" for path in memory_of(self.server.process.pid)]
        different = self.course.differences
        if len(different) > self.args.differing * (len(different) + self.course.outcomes["right"]):
            faults += different
        return faults

    def settle(self) -> None:
        """Waits until nothing is held, and the engines killed last are back."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while self.held() or len(self.engines()) < len(self.stubs()):
            if time.monotonic() > deadline:
                self.course.faults.append(f"still held after {SETTLE_SECONDS:g} s: {self.held()}")
                return
            time.sleep(0.1)

    def held(self) -> dict[str, float]:
        """The metrics that should be 0."""
        metrics = self.server.metrics()
        return {name: metrics[name] for name in HELD if metrics.get(name)}


def resident_megabytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--mode", default="colocated")
    parser.add_argument("--serve", default="", help="further options of `sangam serve`, one string")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--kill-every", type=float, default=0.0, help="seconds; 0 kills nothing")
    parser.add_argument(
        "--differing",
        type=float,
        default=0.0,
        help="share of the answers that may differ from the reference's, as rounding makes them "
        "do in bfloat16",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, default=Path("soak-server.log"))
    args = parser.parse_args()
    options = [f"--model={args.model}", f"--mode={args.mode}", *shlex.split(args.serve)]
    with background_server(options, args.log, START_SECONDS) as server:
        soak = Soak(server, args)
        asyncio.run(soak.run(WARM_UP_SHARE * args.seconds, 0.0))
        soak.settle()
        before = soak.usage()
        asyncio.run(soak.run((1 - WARM_UP_SHARE) * args.seconds, args.kill_every))
        soak.settle()
        after = soak.usage()
    faults = soak.judge(before, after)
    print(json.dumps({"outcomes": soak.course.outcomes, "kills": soak.course.kills}))
    print(json.dumps({"before": before, "after": after}))
    for fault in faults[:20]:
        print(f"fault: {fault}")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
