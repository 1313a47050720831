"""The loop: requests in, iterations, outputs out."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from sangam_backend.config import EngineConfig
from sangam_backend.device import count_pages, pick_device, pick_dtype
from sangam_backend.frontend import open_frontend
from sangam_backend.models import load_model
from sangam_backend.pages import PAGE_SIZE, PageAllocator
from sangam_backend.request import FinishReason, Output, Request
from sangam_backend.runner import Launch, Runner
from sangam_backend.scheduler import Scheduler


class Emission(NamedTuple):
    request: Request
    output: Output


class Engine:
    """Serves requests on one device.

    `submit` and `cancel` may be called from any thread; one thread calls `step` or `run`.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        device = pick_device(config.device)
        dtype = pick_dtype(config.dtype, device)
        model = load_model(config, dtype, device)
        self.pages = PageAllocator(count_pages(config, model.config, dtype, device))
        self.frontend = open_frontend(model, config, self.pages.num_pages * PAGE_SIZE)
        self.runner = Runner(model, config, self.pages.num_pages)
        self.scheduler = Scheduler(
            family=model.config.family,
            max_tokens_per_iteration=config.max_tokens_per_iteration,
            max_batch_size=config.max_batch_size,
            max_sequence_length=self.frontend.limits.max_sequence_length,
            queue_order=config.queue_order,
            pages=self.pages,
        )
        self.overlap = config.overlap
        self._running: Launch | None = None
        self._inbox: deque[tuple[Literal["submit", "cancel"], Request]] = deque()
        self._wake = threading.Event()

    def submit(self, request: Request) -> None:
        self._inbox.append(("submit", request))
        self._wake.set()

    def cancel(self, request: Request) -> None:
        """Ends a request before the next iteration; one that has ended already is left alone."""
        self._inbox.append(("cancel", request))
        self._wake.set()

    def describe(self) -> dict[str, Any]:
        """What an operator wants to know at the start."""
        runner = self.runner
        graphs = runner.graphs
        return {
            "device": str(runner.device),
            "dtype": str(runner.pool.dtype),
            "attention": type(runner.attention).__name__,
            "kv tokens": self.pages.num_pages * PAGE_SIZE,
            "kv GB": round(runner.pool.nbytes / 1e9, 2),
            "logits GB": round(runner.logits_bytes / 1e9, 2),
            "graphs": len(graphs.sizes) if graphs else 0,
            "graph GB": round(graphs.bytes / 1e9, 2) if graphs else 0.0,
            "capture s": round(graphs.capture_seconds, 1) if graphs else 0.0,
        }

    @property
    def is_idle(self) -> bool:
        return not (self.scheduler.num_requests or self._inbox or self._running)

    def step(self) -> list[Emission]:
        """Plans and launches an iteration, and takes the result of the one before.

        An iteration whose outcome the host can count is let run on while the next is planned and
        launched. Any other is waited for first: to guess would cost a row of the next iteration
        for every block that had ended, more than the gap.
        """
        emissions = self._read_inbox()
        if self._running is not None and not (self.overlap and self._running.plan.foreseen):
            emissions += self._take_result()
        plan = self.scheduler.plan()
        launched = None if plan is None else self.runner.launch(plan)
        if self._running is not None:
            emissions += self._take_result()
        self._running = launched
        return emissions

    def _take_result(self) -> list[Emission]:
        assert self._running is not None
        running, self._running = self._running, None
        emissions = []
        for row, tokens in zip(running.plan.rows, running.wait()):
            output = self.scheduler.apply(row, tokens)
            if output is not None:
                emissions.append(Emission(row.request, output))
        return emissions

    def run(self, emit: Callable[[list[Emission]], None], stopping: threading.Event) -> None:
        """Steps until told to stop, and sleeps while there is nothing to do."""
        while not stopping.is_set():
            emissions = self.step()
            if emissions:
                emit(emissions)
            if self.is_idle:
                self._wake.wait()
                self._wake.clear()

    def wake(self) -> None:
        """Makes a sleeping `run` look at its stop signal."""
        self._wake.set()

    def _read_inbox(self) -> list[Emission]:
        emissions = []
        while self._inbox:
            action, request = self._inbox.popleft()
            if action == "submit":
                self.scheduler.add(request)
            elif request.finish_reason is None:
                request.finish_reason = FinishReason.CANCELLED
                self.scheduler.remove(request)
                emissions.append(Emission(request, Output("", [], FinishReason.CANCELLED)))
        return emissions
