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
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from exact_match import accuracy
from make_tiny import FAMILIES, HERE, Family, write
from tasks import TASKS, held_out_items
from tiny_model import Model, save_weights
from torch import Tensor
from training_data import Rows, count_tokens, encoder, make_rows

PEAK_RATE, LEAST_RATE, WARMUP_STEPS = 1.5e-3, 1e-5, 200
WEIGHT_DECAY = 0.05
EMA_DECAY = 0.998
EOS_WEIGHT = 0.05
LATER_BLOCK_WEIGHT = 0.1
FIRST_LENGTH = 256
COMMITS = (1, 4)
"""Tokens a forward in the evaluation."""
LENGTHS_PER_STEP = 2
LOG_STEPS = 500

log = logging.getLogger("train")


class Batch(NamedTuple):
    tokens: Tensor
    starts: Tensor
    ends: Tensor

    @property
    def length(self) -> int:
        return self.tokens.shape[1]


class Clock:
    """How much of the training is done, from 0 to 1."""

    def __init__(self, seconds: float | None, steps: int | None) -> None:
        self._seconds, self._steps = seconds, steps
        self._start = time.monotonic()

    def fraction(self, step: int) -> float:
        if self._seconds is None:
            return step / self._steps if self._steps else 1.0
        return (time.monotonic() - self._start) / self._seconds


def make_batches(rows: dict[int, Rows], tokens: int, device: torch.device) -> list[Batch]:
    """Batches of about `tokens` tokens on the device, the shortest rows first."""
    batches = []
    for length, group in rows.items():
        columns = [torch.from_numpy(column).to(device) for column in group]
        size = max(1, tokens // length)
        whole = len(group.starts) // size * size
        batches += [Batch(*(c[i : i + size] for c in columns)) for i in range(0, whole, size)]
    return batches


def corrupt(batch: Batch, family: Family) -> tuple[Tensor, Tensor]:
    """Masks answers: the ids to show, and each position's weight in the loss.

    Half of the rows are masked anywhere. The others are in the middle of decoding by blocks:
    clean up to a block, masked at some rate in it, and all masked after it.
    """
    tokens, starts, ends = (column.long() for column in batch)
    rows, device = len(tokens), tokens.device
    position = torch.arange(batch.length, device=device) - starts[:, None]
    # More rows at high rates: committing the first tokens of a block is the hardest.
    rate = torch.rand(rows, 1, device=device).sqrt()
    masked = torch.rand(tokens.shape, device=device) < rate
    block = 2 ** torch.randint(3, 6, (rows, 1), device=device)  # 8, 16 or 32
    blocks = (ends - starts)[:, None].add(block - 1) // block
    current = (torch.rand(rows, 1, device=device) * blocks).long()
    ahead = position // block - current
    by_block = torch.rand(rows, 1, device=device) < 0.5
    masked = torch.where(by_block, (ahead > 0) | (masked & (ahead == 0)), masked) & (position >= 0)
    weight = torch.where(by_block & (ahead > 0), LATER_BLOCK_WEIGHT, 1.0) * masked
    weight = weight * torch.where(tokens == family.eos_id, EOS_WEIGHT, 1.0)
    return torch.where(masked, family.mask_id, tokens), weight


def make_loss(model: Model, device: torch.device) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def loss(ids: Tensor, targets: Tensor, weight: Tensor) -> Tensor:
        logits = model(ids).float().flatten(0, 1)
        each = F.cross_entropy(logits, targets.flatten(), reduction="none")
        return (each * weight.flatten()).sum() / weight.sum().clamp(min=1.0)

    return torch.compile(loss, dynamic=True) if device.type == "cuda" else loss


def make_optimizer(model: Model) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, lr=PEAK_RATE, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY, fused=True
    )


def learning_rate(step: int, fraction: float) -> float:
    cosine = 0.5 + 0.5 * math.cos(math.pi * min(1.0, fraction))
    return PEAK_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * cosine + LEAST_RATE


def length_limit(fraction: float) -> float:
    """Short rows first: all lengths take part from the middle of the training on."""
    return FIRST_LENGTH * 2 ** (6 * fraction)


class Trainer:
    def __init__(self, model: Model, family: Family, batches: list[Batch], seed: int) -> None:
        self.model, self.family, self.batches = model, family, batches
        self.device = batches[0].tokens.device
        self.loss = make_loss(model, self.device)
        self.optimizer = make_optimizer(model)
        self.parameters = list(model.parameters())
        self.averages = [p.detach().clone() for p in self.parameters]
        self._lengths = [batch.length for batch in batches]
        self._rng = random.Random(seed)

    def train(self, seconds: float | None, steps: int | None) -> None:
        for batch in (self.batches[0], self.batches[-1]):
            self._backward(batch)  # compiles
        clock, step = Clock(seconds, steps), 0
        while (fraction := clock.fraction(step)) < 1:
            loss = self._step(step, fraction)
            step += 1
            if step % LOG_STEPS == 0:
                log.info("step %d, %.0f %%, loss %.4f", step, 100 * fraction, loss.item())
        log.info("%d steps", step)

    def _step(self, step: int, fraction: float) -> Tensor:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, fraction)
        self.optimizer.zero_grad()
        # Rows of one length are much of one task, so a step sees several lengths.
        losses = [self._backward(self._pick(fraction)) for _ in range(LENGTHS_PER_STEP)]
        loss = torch.stack(losses).mean()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        decay = min(EMA_DECAY, step / (step + 10))
        torch._foreach_lerp_(self.averages, [p.detach() for p in self.parameters], 1 - decay)
        return loss

    def _pick(self, fraction: float) -> Batch:
        allowed = bisect_right(self._lengths, length_limit(fraction))
        return self.batches[self._rng.randrange(max(1, allowed))]

    def _backward(self, batch: Batch) -> Tensor:
        ids, weight = corrupt(batch, self.family)
        shift = self.family.logit_shift
        targets, weight = batch.tokens.long().roll(-shift, 1), weight.roll(-shift, 1)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            loss = self.loss(ids, targets, weight)
        (loss / LENGTHS_PER_STEP).backward()
        return loss.detach()

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
    parser.add_argument("--tokens-per-step", type=int, default=32768)
    parser.add_argument("--eval-items", type=int, default=500, help="held-out items of each task")
    args = parser.parse_args()
    if args.seconds is None and args.steps is None:
        args.seconds = 420.0
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
    rows = make_rows(args.family, args.seed, args.items)
    log.info("%.1f M tokens of data", count_tokens(rows) / 1e6)
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    family = FAMILIES[args.family]
    model = Model(family).to(device)
    log.info("%.2f M parameters", sum(p.numel() for p in model.parameters()) / 1e6)
    trainer = Trainer(
        model,
        family,
        make_batches(rows, args.tokens_per_step // LENGTHS_PER_STEP, device),
        args.seed,
    )
    trainer.train(args.seconds, args.steps)
    trainer.finish()
    write(args.family, args.out)
    save_weights(model, args.family, args.out)
    log.info("written to %s", args.out)
    evaluate(model, args.family, args.eval_items)
    log.info("done")


if __name__ == "__main__":
    main()
