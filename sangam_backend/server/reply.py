"""The way from an engine process back to one client."""

from __future__ import annotations

import threading
from typing import Any

from sangam_backend.request import RequestError
from sangam_backend.server.channel import Channel, Respond


class Reply:
    """The way back to one client."""

    def __init__(self, channel: Channel, id: int, replies: dict[int, Reply]) -> None:
        """It leaves the `replies` when it is final."""
        self._channel = channel
        self._id = id
        self._replies = replies
        self._lock = threading.Lock()
        self._closed = False
        self._cancelled = False

    def send(self, outputs: dict[str, Any], final: bool) -> None:
        self._send(outputs, None, final)

    def finish(self) -> None:
        """Ends the answer without a further response."""
        self._send(None, None, final=True)

    def refuse(self, error: RequestError) -> None:
        self._send(None, error, final=True)

    def cancel(self) -> None:
        self._cancelled = True

    def is_cancelled(self) -> bool:
        return self._cancelled and not self._closed

    def _send(
        self, outputs: dict[str, Any] | None, error: RequestError | None, final: bool
    ) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = final
            self._channel.send(Respond(self._id, outputs, error, final))
        if final:
            self._replies.pop(self._id, None)
