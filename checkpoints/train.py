"""Train one of the small checkpoints by masked diffusion, write it, and measure it.

    python checkpoints/train.py --family llada --seconds 420

The seed fixes the data and the initial weights. With --seconds the schedules follow the clock, so
the number of steps is the machine's; with --steps they follow the steps.
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from exact_match import accuracy
from make_tiny import CONTEXT, FAMILIES, HERE, Family, write
from tasks import TASKS, held_out_items
from tiny_model import Model, Sequences, save_weights
from torch import Tensor
from training_data import EASY_SHARES, Rows, encoder, make_rows

PEAK_RATE, LEAST_RATE, WARMUP_STEPS = 1.5e-3, 1e-5, 200
WEIGHT_DECAY = 0.05
EMA_DECAY = 0.998
EOS_WEIGHT = 0.05
LATER_BLOCK_WEIGHT = 0.1
EASY_LENGTH, EASY_SHARE = 160, 0.3
"""Chats are this short for the first share of the training: retrieval is learned on short ones."""
COMMITS = (1, 4)
"""Tokens a forward in the evaluation."""
LOG_STEPS = 500

log = logging.getLogger("train")


class Row(NamedTuple):
    """One of `Rows`, on the device."""

    tokens: Tensor
    offsets: Tensor
    starts: Tensor
    ends: Tensor

    @property
    def sequences(self) -> Sequences:
        return Sequences(self.offsets, CONTEXT)


class Clock:
    """How much of the training is done, from 0 to 1."""

    def __init__(self, seconds: float | None, steps: int | None) -> None:
        self._seconds, self._steps = seconds, steps
        self._start = time.monotonic()

    def fraction(self, step: int) -> float:
        if self._seconds is None:
            return step / self._steps if self._steps else 1.0
        return (time.monotonic() - self._start) / self._seconds


def corrupt(row: Row, family: Family) -> tuple[Tensor, Tensor]:
    """Masks answers: the ids to show, and each position's weight in the loss, both [tokens].

    Half of the chats are masked anywhere. The others are in the middle of decoding by blocks:
    clean up to a block, masked at some rate in it, and all masked after it.
    """
    tokens, starts, ends = row.tokens.long(), row.starts.long(), row.ends.long()
    count, device = len(starts), tokens.device
    chat = row.sequences.owners(len(tokens))
    position = row.sequences.positions(len(tokens)) - starts[chat]
    # More chats at high rates: committing the first tokens of a block is the hardest.
    rate = torch.rand(count, device=device).sqrt()
    masked = torch.rand(tokens.shape, device=device) < rate[chat]
    block = 2 ** torch.randint(3, 6, (count,), device=device)  # 8, 16 or 32
    answer = ends - starts
    current = (torch.rand(count, device=device) * ((answer + block - 1) // block)).long()
    ahead = position // block[chat] - current[chat]
    by_block = (torch.rand(count, device=device) < 0.5)[chat]
    masked = torch.where(by_block, (ahead > 0) | (masked & (ahead == 0)), masked) & (position >= 0)
    weight = torch.where(by_block & (ahead > 0), LATER_BLOCK_WEIGHT, 1.0) * masked
    weight = weight * torch.where(tokens == family.eos_id, EOS_WEIGHT, 1.0)
    # A long answer counts more than a short one, but not in proportion.
    weight = weight * answer.clamp(min=1)[chat] ** -0.5
    return torch.where(masked, family.mask_id, tokens), weight


def make_loss(model: Model, device: torch.device) -> Callable[..., Tensor]:
    def loss(ids: Tensor, sequences: Sequences, targets: Tensor, weight: Tensor) -> Tensor:
        each = F.cross_entropy(model(ids, sequences).float(), targets, reduction="none")
        return (each * weight).sum() / weight.sum()

    return torch.compile(loss) if device.type == "cuda" else loss


def make_optimizer(model: Model, rate: Tensor) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups,
        lr=rate,
        betas=(0.9, 0.98),
        weight_decay=WEIGHT_DECAY,
        fused=True,
        capturable=rate.is_cuda,
    )


def as_graph(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph: models this small are bound by launches. Runs it three times."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def learning_rate(step: int, fraction: float) -> float:
    cosine = 0.5 + 0.5 * math.cos(math.pi * min(1.0, fraction))
    return PEAK_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * cosine + LEAST_RATE


class Trainer:
    def __init__(self, model: Model, family: Family, easy: Rows, rows: Rows, seed: int) -> None:
        self.model, self.family = model, family
        self.device = model.cos.device
        self.easy, self.rows = (
            Row(*(torch.from_numpy(column).to(self.device) for column in columns))
            for columns in (easy, rows)
        )
        self.row = Row(*(column[0].clone() for column in self.rows))
        self.rate = torch.zeros((), device=self.device)
        self.loss_of = make_loss(model, self.device)
        self.loss = torch.zeros((), device=self.device)
        self.optimizer = make_optimizer(model, self.rate)
        self.parameters = list(model.parameters())
        self.averages = [p.detach().clone() for p in self.parameters]
        self._rng = random.Random(seed)

    def train(self, seconds: float | None, steps: int | None) -> None:
        run = as_graph(self._step) if self.device.type == "cuda" else self._step
        clock, step, total = Clock(seconds, steps), 0, 0.0
        while (fraction := clock.fraction(step)) < 1:
            rows = self.easy if fraction < EASY_SHARE else self.rows
            picked = self._rng.randrange(len(rows.tokens))
            for here, column in zip(self.row, rows):
                here.copy_(column[picked])
            self.rate.fill_(learning_rate(step, fraction))
            run()
            total += self.loss.item()  # keeps the clock beside the device
            step += 1
            if step % LOG_STEPS == 0:
                log.info("step %d, %.0f %%, loss %.4f", step, 100 * fraction, total / LOG_STEPS)
                total = 0.0
        log.info("%d steps", step)

    def _step(self) -> None:
        """One step on `row`; every tensor of it stays where it is, as a graph demands."""
        self.optimizer.zero_grad()
        ids, weight = corrupt(self.row, self.family)
        shift = self.family.logit_shift
        targets, weight = self.row.tokens.long().roll(-shift), weight.roll(-shift)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.loss_of(ids, self.row.sequences, targets, weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        torch._foreach_lerp_(self.averages, [p.detach() for p in self.parameters], 1 - EMA_DECAY)
        self.loss.copy_(loss.detach())

    def finish(self) -> None:
        """The model gets the averaged weights, as bf16 holds them."""
        with torch.no_grad():
            for parameter, average in zip(self.parameters, self.averages):
                parameter.copy_(average.bfloat16())


def evaluate(model: Model, family: str, count: int) -> None:
    log.info("exact match on %d held-out items a task, %s tokens a forward", count, COMMITS)
    for name, task in TASKS.items():
        items = held_out_items(name, count)
        scores = [accuracy(model, encoder(family), items, commits) for commits in COMMITS]
        columns = " ".join(f"{100 * score:5.1f}" for score in scores)
        log.info("%-12s %-5s %s", name, "hard" if task.hard else "plain", columns)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", required=True, choices=list(FAMILIES))
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, help="of training, compilation not counted")
    length.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="the checkpoint's directory")
    parser.add_argument("--log", type=Path, help="a file that gets a copy of the log")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--items", type=int, default=1_500_000, help="chats to train on")
    parser.add_argument("--tokens-per-step", type=int, default=32768, help=f"at least {CONTEXT}")
    parser.add_argument("--eval-items", type=int, default=500, help="held-out items of each task")
    args = parser.parse_args()
    if args.seconds is None and args.steps is None:
        args.seconds = 420.0
    if args.tokens_per_step < CONTEXT:
        parser.error(f"--tokens-per-step is {args.tokens_per_step}, must be at least {CONTEXT}")
    args.out = args.out or HERE / f"tiny-{args.family}"
    return args


def start_log(path: Path | None) -> None:
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout)]
    if path:
        handlers.append(logging.FileHandler(path, mode="w"))
    logging.basicConfig(
        level=logging.INFO, handlers=handlers, format="%(relativeCreated)8d ms  %(message)s"
    )


def main() -> None:
    args = parse_args()
    start_log(args.log)
    size = args.tokens_per_step
    seed, few = f"{args.seed} easy", args.items // 3
    easy = make_rows(args.family, seed, few, size, EASY_LENGTH, EASY_SHARES)
    rows = make_rows(args.family, f"{args.seed}", args.items, size)
    log.info("%.1f M tokens of data", (easy.tokens.size + rows.tokens.size) / 1e6)
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    family = FAMILIES[args.family]
    model = Model(family).to(device)
    log.info("%.2f M parameters", sum(p.numel() for p in model.parameters()) / 1e6)
    trainer = Trainer(model, family, easy, rows, args.seed)
    trainer.train(args.seconds, args.steps)
    trainer.finish()
    write(args.family, args.out)
    save_weights(model, args.family, args.out)
    log.info("written to %s", args.out)
    evaluate(model, args.family, args.eval_items)
    log.info("done")


if __name__ == "__main__":
    main()
