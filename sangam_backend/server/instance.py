"""One instance of the Triton model: the engine and the threads around it."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton_python_backend_utils as pb_utils

from sangam_backend.config import EngineConfig
from sangam_backend.engine import Emission, Engine
from sangam_backend.request import (
    ErrorCode,
    FinishReason,
    Output,
    Request,
    RequestError,
)
from sangam_backend.server.metrics import Gauges
from sangam_backend.server.reply import Reply
from sangam_backend.server.wire import Options, build_response, read_request

POLL_SECONDS = 0.02
WATCH_SECONDS = 0.5
DRAIN_SECONDS = 30.0


class Client(NamedTuple):
    reply: Reply
    options: Options


class Instance:
    """Owns the engine thread, the response thread and the poll thread.

    Triton's own thread calls `accept`; it blocks while the backlog is full, so that Triton gives
    the next request to an instance that has room.
    """

    def __init__(self, args: dict[str, str]) -> None:
        _start(_follow_server, os.getppid())
        model_config = json.loads(args["model_config"])
        parameters = model_config.get("parameters", {})
        config = EngineConfig.from_strings(
            {name: value["string_value"] for name, value in parameters.items()}
        )
        _share_cores(model_config)
        self.engine = Engine(config)
        facts = ", ".join(f"{name} {value}" for name, value in self.engine.describe().items())
        pb_utils.Logger.log_info(f"{args['model_instance_name']}: {facts}")
        self._backlog = config.backlog or config.max_batch_size
        self._clients: dict[Request, Client] = {}
        self._room = threading.Condition()
        self._emissions: queue.SimpleQueue[list[Emission] | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._failure: RequestError | None = None
        self._gauges = Gauges(
            {"model": args["model_name"], "instance": args["model_instance_name"]}
        )
        self._engine_thread = _start(self._run_engine)
        self._response_thread = _start(self._respond)
        self._poll_thread = _start(self._poll)

    def accept(self, triton_request: Any) -> None:
        """Checks a request and hands it to the engine, or refuses it."""
        reply = Reply(triton_request.get_response_sender())
        try:
            incoming = read_request(triton_request)
            request = self.engine.frontend.new_request(
                incoming.request_id, incoming.prompt, incoming.sampling, incoming.options.stream
            )
            self._wait_for_room(reply)
            self._admit(request, Client(reply, incoming.options))
        except RequestError as error:
            reply.refuse(error)
        except Exception as error:
            _refuse_after_fault(reply, error)

    def close(self) -> None:
        """Lets running requests finish for a while, answers the rest, and ends the threads."""
        with self._room:
            self._room.wait_for(lambda: not self._clients, timeout=DRAIN_SECONDS)
        self._stopping.set()
        self.engine.wake()
        self._engine_thread.join()
        self._answer_all(RequestError(ErrorCode.UNAVAILABLE, "the server is shutting down"))
        self._emissions.put(None)
        self._response_thread.join()
        # A response sender that a thread still holds when the process ends crashes the stub.
        self._poll_thread.join()
        self._gauges.close()

    def _wait_for_room(self, reply: Reply) -> None:
        while True:
            with self._room:
                if len(self._clients) < self._backlog or self._failure is not None:
                    return
                self._room.wait(POLL_SECONDS)
            if reply.is_cancelled():
                raise RequestError(ErrorCode.CANCELLED, "cancelled while it waited in the queue")

    def _admit(self, request: Request, client: Client) -> None:
        with self._room:
            if self._failure is not None:
                raise self._failure
            self._clients[request] = client
        self.engine.submit(request)

    def _run_engine(self) -> None:
        try:
            self.engine.run(self._emissions.put, self._stopping)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Answers everybody and ends the process: a dead engine must not look alive."""
        failure = RequestError(ErrorCode.INTERNAL, f"the engine failed: {error!r}")
        with self._room:
            self._failure = failure
        pb_utils.Logger.log_error(
            "the engine failed\n" + "".join(traceback.format_exception(error))
        )
        self._answer_all(failure)
        os._exit(1)

    def _answer_all(self, error: RequestError) -> None:
        with self._room:
            clients = list(self._clients.values())
            self._clients.clear()
        for client in clients:
            client.reply.refuse(error)

    def _respond(self) -> None:
        """Sends what the engine emits, so that the engine never waits for the wire."""
        while (emissions := self._emissions.get()) is not None:
            for request, output in emissions:
                self._send(request, output)

    def _send(self, request: Request, output: Output) -> None:
        final = output.finish_reason is not None
        with self._room:
            client = self._clients.get(request)
            if client is None:
                return
            if final:
                del self._clients[request]
                self._room.notify_all()
        if output.finish_reason is FinishReason.CANCELLED:
            client.reply.refuse(RequestError(ErrorCode.CANCELLED, "the client cancelled"))
            return
        try:
            client.reply.send(build_response(request, client.options, output), final)
        except Exception as error:
            _refuse_after_fault(client.reply, error)

    def _poll(self) -> None:
        """Looks for clients that left, and updates the gauges."""
        while not self._stopping.is_set():
            time.sleep(POLL_SECONDS)
            with self._room:
                clients = list(self._clients.items())
            for request, client in clients:
                if client.reply.is_cancelled():
                    self.engine.cancel(request)
            self._gauges.update(self.engine)


def _start(target: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=target, args=args, name=target.__name__, daemon=True)
    thread.start()
    return thread


def _follow_server(server: int) -> None:
    """Ends the process after its server: a stub left alone waits for ever and holds its GPU."""
    while os.getppid() == server:
        time.sleep(WATCH_SECONDS)
    os._exit(1)


def _refuse_after_fault(reply: Reply, error: Exception) -> None:
    pb_utils.Logger.log_error(traceback.format_exc())
    reply.refuse(RequestError(ErrorCode.INTERNAL, repr(error)))


def _share_cores(model_config: dict[str, Any]) -> None:
    """Splits the cores among the instances of a model on a CPU."""
    groups = model_config.get("instance_group", [])
    instances = sum(group.get("count", 1) for group in groups) or 1
    torch.set_num_threads(max(1, torch.get_num_threads() // instances))
