"""The loop: requests in, iterations, outputs out."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sangam_backend.config import EngineConfig
from sangam_backend.device import count_pages, pick_device, pick_dtype
from sangam_backend.event_log import EventLog, IterationRow
from sangam_backend.frontend import open_frontend
from sangam_backend.histogram import REQUESTS, Histogram
from sangam_backend.models import load_model
from sangam_backend.pages import PAGE_SIZE, PageAllocator
from sangam_backend.plan import Row, StepPlan
from sangam_backend.request import (
    ErrorCode,
    FinishReason,
    Output,
    Prefilled,
    Request,
    RequestError,
)
from sangam_backend.runner import Launch, Runner
from sangam_backend.scheduler import Scheduler
from sangam_backend.transport import Location, Pull, TransportError, open_transport

PULL_POLL_SECONDS = 1e-4


@dataclass(slots=True)
class Counts:
    """What an engine has done since its start."""

    iterations: Counter[str] = field(default_factory=Counter)
    """By what they hold: prefill, decode or mixed."""
    forwards: Counter[str] = field(default_factory=Counter)
    """Rows of the iterations, prefill or decode."""
    batch: Histogram = field(default_factory=lambda: Histogram(REQUESTS))
    """Requests of an iteration."""
    tokens: int = 0
    blocks: int = 0
    handed_over: int = 0
    overflowed: int = 0
    pulled_bytes: int = 0
    pull_seconds: float = 0.0
    repeated: int = 0
    queue: Histogram = field(default_factory=Histogram)
    """Seconds from the arrival of a request to its first prefill."""

    def count(self, rows: Sequence[Row], now: float) -> None:
        """Counts an iteration, launched at this moment of time.monotonic."""
        prefills = sum(row.prefill for row in rows)
        decodes = len(rows) - prefills
        self.iterations[kind_of(prefills, decodes)] += 1
        self.forwards["prefill"] += prefills
        self.forwards["decode"] += decodes
        self.batch.observe(len(rows))
        self.tokens += sum(row.num_tokens for row in rows)
        for row in rows:
            row.request.num_prefills += row.prefill
            if row.request.began is None:
                row.request.began = now
            if row.forward == 0:
                self.queue.observe(now - row.request.arrival)


def kind_of(prefills: int, decodes: int) -> str:
    return "mixed" if prefills and decodes else "prefill" if prefills else "decode"


class Emission(NamedTuple):
    request: Request
    output: Output


class Peers(NamedTuple):
    """How an engine reaches the other instances; called by its thread, must not block."""

    hand_over: Callable[[Request, bool], None] | None = None
    """Of the role prefill: gives a block away, and says whether `prefilled` will follow."""
    prefilled: Callable[[Request, Prefilled], None] | None = None
    """Of the role prefill: brings the prefill of a block that has been given away."""
    pulled: Callable[[Request], None] | None = None
    """Of the role decode: the K/V of the prefill instance is needed no longer."""


ALONE = Peers()


class Engine:
    """Serves requests on one device.

    `submit`, `cancel`, `take_back` and `release` may be called from any thread; one thread calls
    `step` or `run`.
    """

    def __init__(
        self, config: EngineConfig, peers: Peers = ALONE, event_log: EventLog | None = None
    ) -> None:
        self.config = config
        device = pick_device(config.device)
        dtype = pick_dtype(config.dtype, device)
        model = load_model(config, dtype, device)
        self.pages = PageAllocator(count_pages(config, model.config, dtype, device))
        self.frontend = open_frontend(model, config, self.pages.num_pages * PAGE_SIZE)
        self.transport = None if config.role == "colocated" else open_transport(device)
        self.runner = Runner(model, config, self.pages.num_pages, self.transport)
        self.scheduler = Scheduler(
            family=model.config.family,
            max_tokens_per_iteration=config.max_tokens_per_iteration,
            max_batch_size=config.max_batch_size,
            max_sequence_length=self.frontend.limits.max_sequence_length,
            queue_order=config.queue_order,
            pages=self.pages,
            cache=config.cache,
            role=config.role,
            prefill_overflow_tokens=config.prefill_overflow_tokens,
        )
        self.overlap = config.overlap
        self.peers = peers
        self.event_log = event_log
        self.counts = Counts()
        self._running: Launch | None = None
        self._running_row: IterationRow | None = None
        """Its row of the event log."""
        self._pulls: dict[Request, tuple[Pull, float]] = {}
        """With when they were launched."""
        self._exports: dict[Request, Location] = {}
        self._inbox: deque[Callable[[], list[Emission]]] = deque()
        self._wake = threading.Event()

    def submit(self, request: Request) -> None:
        self._post(lambda: self._enter(request))

    def cancel(self, request: Request, error: RequestError | None = None) -> None:
        """Ends a request before the next iteration; one that has ended already is left alone."""
        self._post(lambda: self._cancel(request, error))

    def take_back(self, request: Request, tokens: list[int], num_forwards: int) -> None:
        """Goes on with a request whose block, handed over, another instance has finished.

        Args:
            num_forwards: Of the request so far.
        """
        self._post(lambda: self._take_back(request, tokens, num_forwards))

    def release(self, request: Request) -> None:
        """Frees the pages of a block handed over: its K/V has been pulled."""
        self._post(lambda: self._release(request))

    def describe(self) -> dict[str, Any]:
        """What an operator wants to know at the start."""
        runner = self.runner
        graphs = runner.graphs
        return {
            "role": self.config.role,
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
        emissions = self._read_inbox() + self._finish_pulls()
        if self._running is not None and not (self.overlap and self._running.plan.foreseen):
            emissions += self._take_result()
        plan = self.scheduler.plan()
        if plan is not None:
            emissions += self._begin_pulls(plan.pulls)
        began = time.monotonic()
        launched = self.runner.launch(plan) if plan is not None and plan.rows else None
        row = None
        if launched is not None:
            self.counts.count(launched.plan.rows, began)
            row = self._row(launched.plan, began)
        if launched is not None and self.config.role == "prefill":
            self._hand_over(launched.plan)
        if self._running is not None:
            emissions += self._take_result()
        self._running, self._running_row = launched, row
        return emissions

    def run(self, emit: Callable[[list[Emission]], None], stopping: threading.Event) -> None:
        """Steps until told to stop, and sleeps while there is nothing to do."""
        while not stopping.is_set():
            was_running = self._running is not None
            emissions = self.step()
            if emissions:
                emit(emissions)
            if self._running is None and not was_running and not emissions:
                self._sleep()

    def wake(self) -> None:
        """Makes a sleeping `run` look at its stop signal."""
        self._wake.set()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()

    def _sleep(self) -> None:
        if self._pulls:
            time.sleep(PULL_POLL_SECONDS)
        else:
            self._wake.wait()
            self._wake.clear()

    def _post(self, action: Callable[[], list[Emission]]) -> None:
        self._inbox.append(action)
        self._wake.set()

    def _read_inbox(self) -> list[Emission]:
        emissions = []
        while self._inbox:
            emissions += self._inbox.popleft()()
        return emissions

    def _enter(self, request: Request) -> list[Emission]:
        """Queues a new request, unless too much waits; blocks given to a decode role must go on."""
        limit, waiting = self.config.max_queue_tokens, self.scheduler.waiting_tokens
        is_full = limit and waiting and waiting + request.sequence_length > limit
        if not is_full or self.config.role == "decode" or request.finish_reason is not None:
            return self._queue(request)
        request.finish_reason = FinishReason.ERROR
        error = RequestError(
            ErrorCode.UNAVAILABLE,
            f"{waiting} tokens wait, {request.sequence_length} more exceed the limit of {limit} "
            "(max_queue_tokens)",
        )
        return [Emission(request, Output("", [], request.finish_reason, error, done=True))]

    def _queue(self, request: Request) -> list[Emission]:
        if request.finish_reason is not None:
            return []  # cancelled before it came
        if request.prefilled is not None and request.prefilled.location is None:
            return [Emission(request, output)] if (output := self.scheduler.pulled(request)) else []
        if self.scheduler.overflows():
            assert self.peers.hand_over is not None
            self.counts.overflowed += 1
            self.scheduler.hand_over(request)
            self.peers.hand_over(request, False)
        else:
            self.scheduler.add(request)
        return []

    def _cancel(self, request: Request, error: RequestError | None) -> list[Emission]:
        if request.finish_reason is not None and request not in self.scheduler.handed_over:
            return []
        request.finish_reason = FinishReason.CANCELLED if error is None else FinishReason.ERROR
        self._forget_export(request)
        if request in self._pulls:
            # Its pages must not be given away while they are written.
            pull, _ = self._pulls.pop(request)
            with contextlib.suppress(TransportError):
                pull.finish()
        self.scheduler.remove(request)
        output = Output("", [], request.finish_reason, error, done=True)
        return [Emission(request, output)]

    def _take_back(self, request: Request, tokens: list[int], num_forwards: int) -> list[Emission]:
        if request not in self.scheduler.handed_over:
            return []
        self._forget_export(request)
        output = self.scheduler.take_back(request, tokens)
        request.num_forwards = num_forwards
        return self._queue(request) if output is None else [Emission(request, output)]

    def _release(self, request: Request) -> list[Emission]:
        if request in self.scheduler.handed_over:
            self._forget_export(request)
            self.scheduler.release(request)
        return []

    def _take_result(self) -> list[Emission]:
        assert self._running is not None
        running, self._running = self._running, None
        results = running.wait()
        if self.event_log is not None and self._running_row is not None:
            end = self.event_log.wall(time.monotonic())
            seconds = round(end - self._running_row.time, 6)
            self.event_log.add(self._running_row._replace(seconds=seconds))
        emissions = []
        for row, tokens in zip(running.plan.rows, results):
            finished = row.request.finished_blocks
            output = self.scheduler.apply(row, tokens)
            self.counts.blocks += row.request.finished_blocks - finished
            if self.config.role == "prefill":
                self._export(row.request, tokens)
            elif output is not None:
                emissions.append(Emission(row.request, output))
        return emissions

    def _row(self, plan: StepPlan, began: float) -> IterationRow | None:
        """What the event log says of an iteration that has just been launched."""
        if self.event_log is None:
            return None
        prefills = sum(row.prefill for row in plan.rows)
        decodes = len(plan.rows) - prefills
        scheduler = self.scheduler
        return IterationRow(
            time=self.event_log.wall(began),
            kind=kind_of(prefills, decodes),
            prefills=prefills,
            decodes=decodes,
            batch_size=len(plan.rows),
            tokens=plan.num_tokens,
            deficit=scheduler.deficit,
            waiting=len(scheduler.waiting) + len(scheduler.arriving),
            active=len(scheduler.decoding) + len(scheduler.pulling),
            kv_pages=self.pages.num_used,
        )

    def _hand_over(self, plan: StepPlan) -> None:
        """While the prefills run, so that the way to a decode instance costs no time."""
        assert self.peers.hand_over is not None
        for row in plan.rows:
            self.counts.handed_over += 1
            self.peers.hand_over(row.request, True)

    def _export(self, request: Request, tokens: list[int]) -> None:
        if request not in self.scheduler.handed_over:
            return
        assert self.peers.prefilled is not None
        assert self.transport is not None
        location = None
        if request.pages:
            location = self._exports[request] = self.transport.export(request.pages)
        self.peers.prefilled(request, Prefilled(tokens, location))

    def _forget_export(self, request: Request) -> None:
        if (location := self._exports.pop(request, None)) is not None:
            assert self.transport is not None
            self.transport.release(location)

    def _begin_pulls(self, requests: list[Request]) -> list[Emission]:
        emissions = []
        for request in requests:
            assert self.transport is not None
            assert request.prefilled is not None
            assert request.prefilled.location is not None
            try:
                location = request.prefilled.location
                pull = self.transport.pull(location, request.pages)
                self._pulls[request] = pull, time.monotonic()
            except TransportError as error:
                emissions += self._lose(request, error)
        return emissions

    def _finish_pulls(self) -> list[Emission]:
        emissions = []
        for request in [request for request, (pull, _) in self._pulls.items() if pull.is_done()]:
            pull, began = self._pulls.pop(request)
            try:
                pull.finish()
            except TransportError as error:
                emissions += self._lose(request, error)
                continue
            self.counts.pulled_bytes += pull.num_bytes
            self.counts.pull_seconds += time.monotonic() - began
            output = self.scheduler.pulled(request)
            if request.slot >= 0:
                self.runner.admit(request)
            self._tell_pulled(request)
            if output is not None:
                emissions.append(Emission(request, output))
        return emissions

    def _lose(self, request: Request, error: TransportError) -> list[Emission]:
        """The K/V of a prefill is lost: a hybrid decode instance can repeat the prefill."""
        self._tell_pulled(request)
        if self.config.prefill_overflow_tokens:
            self.counts.repeated += 1
            self.scheduler.pull_failed(request)
            return []
        return self._cancel(request, RequestError(ErrorCode.UNAVAILABLE, str(error)))

    def _tell_pulled(self, request: Request) -> None:
        assert self.peers.pulled is not None
        self.peers.pulled(request)
