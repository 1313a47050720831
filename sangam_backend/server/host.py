"""Triton's side of an instance: carries requests to the engine process, and answers back."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import triton_python_backend_utils as pb_utils

from sangam_backend.config import MAX_REQUEST_TIME
from sangam_backend.processes import FROZEN_SECONDS, Process
from sangam_backend.request import ErrorCode, RequestError
from sangam_backend.server.channel import (
    Cancel,
    Channel,
    Close,
    Enter,
    Entered,
    Queued,
    Readings,
    Respond,
    Start,
    Started,
)
from sangam_backend.server.metrics import Metrics
from sangam_backend.server.options import Incoming, fault_in_queue, shutting_down
from sangam_backend.server.readings import outcome_series
from sangam_backend.server.sender import Sender
from sangam_backend.server.wire import build_response, read_handover, read_request

POLL_SECONDS = 0.02
BEAT_SECONDS = 1.0
LONGEST_BACK_OFF = 30.0
LOOKS = 256
"""Clients that one poll looks after: thousands may wait, and each look takes microseconds."""


class StartError(Exception):
    """The engine process cannot start."""


class EngineProcess(NamedTuple):
    process: subprocess.Popen[bytes]
    channel: Channel

    @classmethod
    def launch(cls, command: Sequence[str], start: Start) -> EngineProcess:
        """Its death is heard of on the channel, as ours is by it."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen([*command, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        channel = Channel(Connection(ours.detach()))
        channel.send(start)
        return cls(process, channel)

    def wait_until_started(self) -> None:
        started = self.channel.receive()
        if not isinstance(started, Started):
            raise StartError(self.bury())
        if started.fault is not None:
            self.bury()
            raise StartError(started.fault)

    def bury(self) -> str:
        """Waits for its end, and says how it came."""
        self.channel.close()
        status = self.process.wait()
        how = f"signal {-status}" if status < 0 else f"status {status}"
        return f"the engine process ended with {how}"


@dataclass(eq=False, slots=True)
class Visitor:
    """A request on its way to the engine process, or in it."""

    content: Any
    sender: Sender
    queued: bool = False
    entered: bool = False
    responded: bool = False
    cancelled: bool = False

    @property
    def deadline(self) -> float | None:
        return self.content.deadline if isinstance(self.content, Incoming) else None


class Host:
    """Starts the engine process, and starts it again when it has died.

    Triton's own thread calls `accept`, which returns when the engine process has taken the request,
    at once or when it has room: see `Entrance`. Meanwhile Triton gives the next one to others.
    """

    def __init__(self, args: dict[str, str], command: Sequence[str]) -> None:
        """Raises StartError."""
        self._start = Start(args, Process.of(os.getppid()), os.getpid())
        parameters = json.loads(args["model_config"]).get("parameters", {})
        self._role = parameters.get("role", {}).get("string_value", "colocated")
        longest = parameters.get("max_request_time", {}).get("string_value")
        self._longest = float(longest or MAX_REQUEST_TIME)
        self._command = [_python(), *command]
        self._ids = itertools.count()
        self._visitors: dict[int, Visitor] = {}
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._metrics = Metrics(
            {"model": args["model_name"], "instance": args["model_instance_name"]}
        )
        self._process = EngineProcess.launch(self._command, self._start)
        self._process.wait_until_started()
        self._heard = time.monotonic()
        self._engine: EngineProcess | None = self._process
        self._run_thread = threading.Thread(target=self._run, daemon=True)
        self._poll_thread = threading.Thread(target=self._poll, daemon=True)
        self._run_thread.start()
        self._poll_thread.start()

    def accept(self, triton_request: Any) -> None:
        """Brings a request to the engine process, or refuses it."""
        sender = Sender(triton_request.get_response_sender())
        try:
            self._enter(Visitor(self._read(triton_request), sender))
        except RequestError as error:
            self._refuse(sender, error)
        except Exception as fault:
            pb_utils.Logger.log_error(traceback.format_exc())
            self._refuse(sender, RequestError(ErrorCode.INTERNAL, repr(fault)))

    def _read(self, triton_request: Any) -> Any:
        if self._role == "decode":
            return read_handover(triton_request)
        return read_request(triton_request, self._longest)

    def close(self) -> None:
        """Lets the engine process finish what runs, and ends it."""
        self._closing.set()
        if (engine := self._engine) is not None:
            engine.channel.send(Close())
            self._run_thread.join()
        if self._process.process.poll() is None:
            self._process.process.kill()
        # A response sender that a thread still holds when the process ends crashes the stub.
        self._run_thread.join()
        self._poll_thread.join()
        for visitor in self._take_all():
            self._refuse(visitor.sender, shutting_down())
        self._metrics.close()

    def _refuse(self, sender: Sender, error: RequestError) -> None:
        """Every failure that a client is told passes here, whoever found it."""
        self._count_failure(error)
        sender.refuse(error)

    def _count_failure(self, error: RequestError) -> None:
        """A decode instance's are counted where the request came in."""
        if self._role != "decode":
            self._metrics.count(outcome_series(error.code.value.lower()))

    def _enter(self, visitor: Visitor) -> None:
        """An engine process that dies before it has taken a request leaves it to the next."""
        id = next(self._ids)
        while not self._bring(id, visitor, self._wait_for_engine(visitor)):
            pass

    def _bring(self, id: int, visitor: Visitor, engine: EngineProcess) -> bool:
        """Whether the engine process has taken or refused the request."""

        def is_settled() -> bool:
            return visitor.queued or visitor.entered or id not in self._visitors

        with self._changed:
            self._visitors[id] = visitor
        engine.channel.send(Enter(id, visitor.content))
        with self._changed:
            self._changed.wait_for(lambda: is_settled() or self._engine is not engine)
            if is_settled():
                return True
            del self._visitors[id]
            return False

    def _wait_for_engine(self, visitor: Visitor) -> EngineProcess:
        while True:
            with self._changed:
                if self._closing.is_set():
                    raise shutting_down()
                if self._engine is not None:
                    return self._engine
                self._changed.wait(POLL_SECONDS)
            if fault := fault_in_queue(visitor.sender.is_cancelled(), visitor.deadline):
                raise fault

    def _run(self) -> None:
        """Follows one engine process after the other."""
        while (engine := self._engine) is not None:
            while (message := engine.channel.receive()) is not None:
                self._heard = time.monotonic()
                try:
                    self._take_message(message)
                except Exception:
                    pb_utils.Logger.log_error(traceback.format_exc())
            end = engine.bury()
            with self._changed:
                self._engine = None
                self._changed.notify_all()
            self._tell_visitors(RequestError(ErrorCode.UNAVAILABLE, end))
            self._metrics.restart()
            if not self._closing.is_set():
                pb_utils.Logger.log_error(f"{end}; it is started again")
                self._restart()

    def _restart(self) -> None:
        back_off = 1.0
        while not self._closing.is_set():
            try:
                self._process = EngineProcess.launch(self._command, self._start)
                self._process.wait_until_started()
            except (StartError, OSError) as error:
                pb_utils.Logger.log_error(f"{error}; next attempt in {back_off:g} s")
                self._closing.wait(back_off)
                back_off = min(2 * back_off, LONGEST_BACK_OFF)
                continue
            with self._changed:
                self._heard = time.monotonic()
                for id, visitor in self._visitors.items():
                    if visitor.queued:
                        self._process.channel.send(Enter(id, visitor.content))
                self._engine = self._process
                self._changed.notify_all()
            return

    def _take_message(self, message: Any) -> None:
        if isinstance(message, Readings):
            self._metrics.write(message.values)
        elif isinstance(message, Respond):
            self._respond(message)
        elif isinstance(message, Queued | Entered):
            with self._changed:
                if (visitor := self._visitors.get(message.id)) is not None:
                    visitor.queued = isinstance(message, Queued)
                    visitor.entered = not visitor.queued
                    self._changed.notify_all()

    def _respond(self, message: Respond) -> None:
        visitor = self._visitors.get(message.id)
        if visitor is None:
            return
        visitor.responded = True
        if message.error is not None:
            self._refuse(visitor.sender, message.error)
        elif message.outputs is None:
            visitor.sender.finish()
        else:
            visitor.sender.send(build_response(message.outputs), message.final)
        if message.final:
            with self._changed:
                self._visitors.pop(message.id, None)
                self._changed.notify_all()

    def _tell_visitors(self, error: RequestError) -> None:
        """In a pipeline of two instances it is for the other to tell the client.

        Its step here must end without an error: see `roles`.
        """
        for visitor in self._take_all(entered=True):
            told_there = self._role == "prefill" and visitor.responded
            if self._role == "decode" or told_there:
                self._count_failure(error)
                visitor.sender.finish()
            else:
                self._refuse(visitor.sender, error)

    def _take_all(self, entered: bool = False) -> list[Visitor]:
        with self._changed:
            ids = [id for id, visitor in self._visitors.items() if visitor.entered or not entered]
            return [self._visitors.pop(id) for id in ids]

    def _poll(self) -> None:
        """Looks for clients that have left, and gives a sign of life."""
        next_beat = 0.0
        for turn in itertools.count():
            time.sleep(POLL_SECONDS)
            if not self._run_thread.is_alive():
                return
            if (now := time.monotonic()) > next_beat:
                next_beat = now + BEAT_SECONDS
                self._metrics.beat()
            self._kill_a_frozen_engine()
            with self._changed:
                visitors = list(self._visitors.items())
                engine = self._engine
            stride = 1 + len(visitors) // LOOKS
            for id, visitor in visitors[turn % stride :: stride]:
                if engine and not visitor.cancelled and visitor.sender.is_cancelled():
                    visitor.cancelled = True
                    engine.channel.send(Cancel(id))

    def _kill_a_frozen_engine(self) -> None:
        engine = self._engine
        if engine is not None and time.monotonic() - self._heard > FROZEN_SECONDS:
            pb_utils.Logger.log_error(f"no sign of the engine process for {FROZEN_SECONDS:g} s")
            engine.process.kill()


def _python() -> str:
    """Of the stub, whose own sys.executable may be anything: it takes the first on PATH."""
    return shutil.which("python3") or sys.executable
