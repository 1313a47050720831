"""A response sender of Triton, handled with care."""

from __future__ import annotations

import threading
from typing import Any

import triton_python_backend_utils as pb_utils

from sangam_backend.request import RequestError
from sangam_backend.server.wire import build_error


class Sender:
    """Guards a response sender.

    Triton 24.10 crashes when a sender is touched after its FINAL flag, and hangs the client when
    a sender is dropped without one; so every use goes through the lock and the closed flag.
    """

    def __init__(self, sender: Any) -> None:
        self._sender = sender
        self._lock = threading.Lock()
        self._closed = False

    def send(self, response: Any, final: bool) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = final
            flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
            self._sender.send(response, flags=flags)

    def finish(self) -> None:
        """Ends the answer without a further response."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def refuse(self, error: RequestError) -> None:
        self.send(build_error(error), final=True)

    def is_cancelled(self) -> bool:
        with self._lock:
            return not self._closed and bool(self._sender.is_cancelled())
