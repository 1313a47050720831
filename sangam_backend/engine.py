"""The loop: requests in, iterations, outputs out."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Literal, NamedTuple

from sangam_backend.attention import PagedSdpaAttention
from sangam_backend.config import EngineConfig
from sangam_backend.device import count_pages, pick_device, pick_dtype
from sangam_backend.frontend import open_frontend
from sangam_backend.models import load_model
from sangam_backend.pages import PAGE_SIZE, PageAllocator
from sangam_backend.request import FinishReason, Output, Request
from sangam_backend.runner import Runner
from sangam_backend.scheduler import Scheduler


class Emission(NamedTuple):
    request: Request
    output: Output


class Engine:
    """Serves requests on one device.

    `submit` and `cancel` may be called from any thread; one thread calls `step` or `run`.
    """

    def __init__(self, config: EngineConfig) -> None:
        device = pick_device(config.device)
        dtype = pick_dtype(config.dtype, device)
        model = load_model(config, dtype, device)
        self.pages = PageAllocator(count_pages(config, model.config, dtype, device))
        self.frontend = open_frontend(model, config, self.pages.num_pages * PAGE_SIZE)
        attention = PagedSdpaAttention(model.config, self.pages.num_pages, dtype, device)
        self.runner = Runner(model, attention, config.max_batch_size)
        self.scheduler = Scheduler(
            family=model.config.family,
            max_tokens_per_iteration=config.max_tokens_per_iteration,
            max_batch_size=config.max_batch_size,
            max_sequence_length=self.frontend.limits.max_sequence_length,
            queue_order=config.queue_order,
            pages=self.pages,
        )
        self._inbox: deque[tuple[Literal["submit", "cancel"], Request]] = deque()
        self._wake = threading.Event()

    def submit(self, request: Request) -> None:
        self._inbox.append(("submit", request))
        self._wake.set()

    def cancel(self, request: Request) -> None:
        """Ends a request before the next iteration; one that has ended already is left alone."""
        self._inbox.append(("cancel", request))
        self._wake.set()

    def step(self) -> list[Emission]:
        """Runs one iteration, if there is anything to do."""
        emissions = self._read_inbox()
        plan = self.scheduler.plan()
        if plan is None:
            return emissions
        for row, block in zip(plan.rows, self.runner.run(plan)):
            output = row.request.advance(block)
            self.scheduler.finish_row(row.request)
            if output is not None:
                emissions.append(Emission(row.request, output))
        return emissions

    def run(self, emit: Callable[[list[Emission]], None], stopping: threading.Event) -> None:
        """Steps until told to stop, and sleeps while there is nothing to do."""
        while not stopping.is_set():
            emissions = self.step()
            if emissions:
                emit(emissions)
            if not self.scheduler.num_requests and not self._inbox:
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
