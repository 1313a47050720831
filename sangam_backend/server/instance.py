"""One instance of the model in its engine process: the engine and the threads around it."""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from sangam_backend.config import EngineConfig
from sangam_backend.engine import Emission, Engine, Peers
from sangam_backend.event_log import open_event_log
from sangam_backend.request import (
    ErrorCode,
    FinishReason,
    Output,
    Request,
    RequestError,
)
from sangam_backend.server.channel import Channel, Readings, Start
from sangam_backend.server.options import (
    Incoming,
    Options,
    fault_in_queue,
    shutting_down,
    timed_out,
)
from sangam_backend.server.readings import Series, Tally, read_all
from sangam_backend.server.reply import Reply
from sangam_backend.server.request_log import RequestLog

POLL_SECONDS = 0.02
SIGN_SECONDS = 1.0

log = logging.getLogger("sangam")


class Client(NamedTuple):
    reply: Reply
    options: Options
    deadline: float | None
    """On the clock of time.monotonic."""


class Instance:
    """Owns the engine thread, the response thread and the poll thread.

    `accept` blocks while the backlog is full, so that Triton gives the next request to an instance
    that has room.
    """

    def __init__(self, start: Start, channel: Channel, config: EngineConfig, peers: Peers) -> None:
        name = start.args["model_instance_name"]
        _share_cores(json.loads(start.args["model_config"]))
        event_log = open_event_log(config.event_log, name, config.role)
        self._request_log = RequestLog(event_log)
        config = replace(config, device=_own_device(config.device, name))
        self.engine = Engine(config, peers, event_log)
        facts = ", ".join(f"{name} {value}" for name, value in self.engine.describe().items())
        log.info("%s: %s", name, facts)
        self._backlog = config.backlog or config.max_batch_size
        self._clients: dict[Request, Client] = {}
        self.room = threading.Condition()
        """Notified when a request comes or goes."""
        self.max_queue_size = config.max_queue_size if self._is_alone(start) else None
        self._outbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._giving_up = threading.Event()
        self._stopping = threading.Event()
        self._failure: RequestError | None = None
        self._channel = channel
        self._tally = Tally()
        self._last_commit: dict[Request, float] = {}
        self._read: dict[Series, float] = {}
        self._next_sign = 0.0
        self._engine_thread = threading.Thread(target=self._run_engine, daemon=True)
        self._response_thread = threading.Thread(target=self._respond, daemon=True)
        self._poll_thread = threading.Thread(target=self._poll, daemon=True)

    def start(self) -> None:
        for thread in (self._engine_thread, self._response_thread, self._poll_thread):
            thread.start()

    def accept(self, content: Any, reply: Reply) -> None:
        """Checks a request and hands it to the engine, or refuses it."""
        try:
            self._accept(content, reply)
        except RequestError as error:
            self.refuse(content, reply, error)
        except Exception as error:
            trace_id = content.trace_id if isinstance(content, Incoming) else ""
            _refuse_after_fault(reply, error, trace_id)

    def refuse(self, content: Any, reply: Reply, error: RequestError) -> None:
        """Answers a request that has not come as far as the engine."""
        self._request_log.add_refusal(content, error)
        reply.refuse(error)

    def has_room(self) -> bool:
        return (
            self._num_held() < self._backlog
            or self._failure is not None
            or self._giving_up.is_set()
        )

    def set_queued(self, count: int) -> None:
        """How many requests wait to be accepted."""
        if count != self._tally.queued:
            self._tally.queued = count
            self.room.notify_all()

    def give_up(self) -> None:
        """Ends running requests with an error, and those that still come."""
        self._giving_up.set()

    def close(self) -> None:
        """Lets running requests finish, answers late ones, and ends the threads."""
        with self.room:
            self.room.wait_for(self._is_drained)
        self._stopping.set()
        self.engine.wake()
        self._engine_thread.join()
        self._answer_all(shutting_down())
        self._outbox.put(None)
        self._response_thread.join()
        self._poll_thread.join()
        self.engine.close()
        self._request_log.close()

    def _is_drained(self) -> bool:
        return not self._clients and not self._tally.queued

    def _is_alone(self, start: Start) -> bool:
        return _num_instances(json.loads(start.args["model_config"])) == 1

    def _accept(self, content: Any, reply: Reply) -> None:
        incoming: Incoming = content
        request = self.engine.frontend.new_request(
            incoming.request_id, incoming.prompt, incoming.sampling, self._streams(incoming.options)
        )
        request.trace_id = incoming.trace_id
        self._admit(request, Client(reply, incoming.options, incoming.deadline))
        self._tally.tokens["sangam_prompt_tokens_total"] += len(request.prompt)

    def _streams(self, options: Options) -> bool:
        """Whether the engine's requests give their text as it comes."""
        return options.stream

    def _admit(self, request: Request, client: Client) -> None:
        """Waits for room, then hands the request to the engine."""
        self._wait_for_room(client)
        with self.room:
            if self._failure is not None:
                raise self._failure
            self._clients[request] = client
        self._begin(request)

    def _begin(self, request: Request) -> None:
        self.engine.submit(request)

    def _wait_for_room(self, client: Client) -> None:
        while True:
            if self._giving_up.is_set():
                raise shutting_down()
            with self.room:
                if self.has_room():
                    return
                self.room.wait(POLL_SECONDS)
            if fault := fault_in_queue(client.reply.is_cancelled(), client.deadline):
                raise fault

    def _num_held(self) -> int:
        """Requests that count against the backlog."""
        return len(self._clients)

    def _run_engine(self) -> None:
        try:
            self.engine.run(self._emit, self._stopping)
        except BaseException as error:
            self._fail(error)

    def _emit(self, emissions: list[Emission]) -> None:
        """Responses are sent by another thread, so that the engine never waits for the wire."""

        def send() -> None:
            for request, output in emissions:
                self._send(request, output)

        self._outbox.put(send)

    def _fail(self, error: BaseException) -> None:
        """Answers everybody and ends the process: a dead engine must not look alive."""
        failure = RequestError(ErrorCode.INTERNAL, f"the engine failed: {error!r}")
        with self.room:
            self._failure = failure
        log.error("the engine failed", exc_info=error)
        self._answer_all(failure)
        self._request_log.close()
        os._exit(1)

    def _answer_all(self, error: RequestError) -> None:
        with self.room:
            clients = dict(self._clients)
            self._clients.clear()
        for request, client in clients.items():
            self._request_log.add_end(request, error.code.value.lower())
            client.reply.refuse(error)

    def _respond(self) -> None:
        while (send := self._outbox.get()) is not None:
            try:
                send()
            except Exception:
                log.exception("a response could not be sent")

    def _send(self, request: Request, output: Output) -> None:
        client = self._take_client(request, output.done)
        if client is None:
            return
        error = error_of(output)
        if error is None:
            self._count_output(request, output, first=True)
        if output.done:
            self._count_end(request, error)
        if error is not None:
            client.reply.refuse(error)
            return
        try:
            client.reply.send(client.options.outputs(request, output), output.done)
        except Exception as fault:
            _refuse_after_fault(client.reply, fault, request.trace_id)

    def _count_output(self, request: Request, output: Output, first: bool) -> None:
        """`first` tells whether nothing of the request has been sent before it came here."""
        now = time.monotonic()
        if output.ids:
            self._tally.tokens["sangam_generated_tokens_total"] += len(output.ids)
            if request in self._last_commit:
                self._tally.between_commits.observe(now - self._last_commit[request])
            elif first:
                self._tally.first_text.observe(now - request.arrival)
            self._last_commit[request] = now
            self._request_log.saw_text(request, now)
        if output.done:
            self._last_commit.pop(request, None)

    def _count_end(self, request: Request, error: RequestError | None) -> None:
        self._last_commit.pop(request, None)
        outcome = request.finish_reason.value if request.finish_reason else ""
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._tally.outcomes[outcome] += 1
        self._tally.whole.observe(time.monotonic() - request.arrival)
        self._request_log.add_end(request, error.code.value.lower() if error else outcome)

    def _take_client(self, request: Request, done: bool) -> Client | None:
        """The client of a request, which is forgotten when it is done; None if it is already."""
        with self.room:
            client = self._clients.get(request)
            if client is not None and done:
                del self._clients[request]
                self.room.notify_all()
        return client

    def _poll(self) -> None:
        """Looks for clients that left or ran out of time, and updates the metrics."""
        while not self._stopping.is_set():
            time.sleep(POLL_SECONDS)
            try:
                self._look_after_clients(time.monotonic())
                self._watch(time.monotonic())
                self._tell_readings(time.monotonic())
            except Exception:
                log.exception("the clients could not be looked after")

    def _tell_readings(self, now: float) -> None:
        """When something has changed, and from time to time as a sign of life."""
        values = read_all(self.engine, self._tally)
        changed = {
            series: value for series, value in values.items() if value != self._read.get(series)
        }
        if changed or now > self._next_sign:
            self._read = values
            self._next_sign = now + SIGN_SECONDS
            self._channel.send(Readings(changed))

    def _look_after_clients(self, now: float) -> None:
        with self.room:
            clients = list(self._clients.items())
        kept = self._out_of_hand()
        for request, client in clients:
            if request in kept:
                continue
            if self._giving_up.is_set():
                self.engine.cancel(request, shutting_down())
            elif client.deadline is not None and now > client.deadline:
                self.engine.cancel(request, timed_out())
            elif client.reply.is_cancelled():
                self.engine.cancel(request)

    def _out_of_hand(self) -> set[Request]:
        """Requests that are not this instance's to end early."""
        return set()

    def _watch(self, now: float) -> None:
        """What a role looks after besides."""


def error_of(output: Output) -> RequestError | None:
    if output.error is None and output.finish_reason is FinishReason.CANCELLED:
        return RequestError(ErrorCode.CANCELLED, "the client cancelled")
    return output.error


def _refuse_after_fault(reply: Reply, error: Exception, trace_id: str) -> None:
    log.error("a request failed, trace id %s", trace_id or "none", exc_info=error)
    reply.refuse(RequestError(ErrorCode.INTERNAL, repr(error)))


def _own_device(devices: str, instance_name: str) -> str:
    """The instances of a model take the listed devices in turn."""
    names = devices.split(",")
    return names[int(instance_name.rpartition("_")[2]) % len(names)]


def _share_cores(model_config: dict[str, Any]) -> None:
    """Splits the cores among the instances of a model on a CPU."""
    torch.set_num_threads(max(1, torch.get_num_threads() // _num_instances(model_config)))


def _num_instances(model_config: dict[str, Any]) -> int:
    groups = model_config.get("instance_group", [])
    return sum(group.get("count", 1) for group in groups) or 1
