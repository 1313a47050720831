"""What Triton's process of an instance and its engine process say to each other."""

from __future__ import annotations

import contextlib
import threading
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from sangam_backend.processes import Process
from sangam_backend.request import RequestError
from sangam_backend.server.readings import Series


class Start(NamedTuple):
    """The first message to an engine process."""

    args: dict[str, str]
    """What Triton tells an instance of itself."""
    server: Process
    """Tritonserver."""
    stub: int
    """Process id of the one that Triton started for the instance."""


class Started(NamedTuple):
    """The engine process serves, or says why it cannot."""

    fault: str | None = None


class Enter(NamedTuple):
    """A request: what wire.read_request or wire.read_handover has made of it."""

    id: int
    content: Any


class Queued(NamedTuple):
    """The request waits in the engine process; one that dies before it has entered leaves it."""

    id: int


class Entered(NamedTuple):
    """The engine process has taken the request, or refused it."""

    id: int


class Cancel(NamedTuple):
    """The client has left."""

    id: int


class Respond(NamedTuple):
    """A response, an error, or with neither the bare end of the answer."""

    id: int
    outputs: dict[str, Any] | None
    error: RequestError | None
    final: bool


class Readings(NamedTuple):
    """Values of metrics that have changed."""

    values: dict[Series, float]


class Close(NamedTuple):
    """Finish what runs, and end."""


class Channel:
    """One end of a pair of connected sockets; any thread may send."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: NamedTuple) -> None:
        """Drops the message when the other end is gone, which `receive` reports."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.send(message)

    def receive(self) -> Any:
        """Waits for a message; None when the other end is gone."""
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            return None

    def close(self) -> None:
        self._connection.close()
