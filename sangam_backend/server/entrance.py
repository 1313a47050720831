"""Where requests wait for room in an instance."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, NamedTuple

from sangam_backend.request import ErrorCode, RequestError
from sangam_backend.server.channel import Channel, Enter, Entered, Queued
from sangam_backend.server.instance import POLL_SECONDS, Instance
from sangam_backend.server.options import Incoming, fault_in_queue
from sangam_backend.server.reply import Reply

SWEEP_SECONDS = 0.25
"""Thousands may wait: looking at all of them at every admission would cost the engine's time."""


class Waiting(NamedTuple):
    id: int
    content: Any
    reply: Reply

    def fault(self) -> RequestError | None:
        deadline = self.content.deadline if isinstance(self.content, Incoming) else None
        return fault_in_queue(self.reply.is_cancelled(), deadline)


class Entrance:
    """Lets requests in, one after the other.

    An instance that is alone takes all that comes, keeps it here in order, and refuses what is too
    much. Of several, each takes the next request when it has room for it, so that Triton's one
    queue feeds whichever is free.
    """

    def __init__(self, channel: Channel, instance: Instance, most: int | None) -> None:
        """`most` requests may wait here; None for an instance that is not alone."""
        self._channel = channel
        self._instance = instance
        self._most = most
        self._waiting: deque[Waiting] = deque()

    def put(self, message: Enter, reply: Reply) -> None:
        with self._instance.room:
            full = self._most is not None and len(self._waiting) >= self._most
            if not full:
                self._waiting.append(Waiting(message.id, message.content, reply))
                self._count()
        if full:
            text = f"{self._most} requests wait already, that is the limit (max_queue_size)"
            error = RequestError(ErrorCode.UNAVAILABLE, text)
            self._instance.refuse(message.content, reply, error)
        elif self._most is not None:
            self._channel.send(Queued(message.id))

    def run(self) -> None:
        next_sweep = 0.0
        while True:
            with self._instance.room:
                self._instance.room.wait_for(self._may_enter, POLL_SECONDS)
                faults = []
                if (now := time.monotonic()) > next_sweep:
                    faults = self._take_faults()
                    next_sweep = now + SWEEP_SECONDS
                first = self._waiting.popleft() if self._may_enter() else None
                self._count()
            for waiting, fault in faults:
                self._instance.refuse(waiting.content, waiting.reply, fault)
            if first is not None:
                self._let_in(first)

    def _let_in(self, waiting: Waiting) -> None:
        if fault := waiting.fault():
            self._instance.refuse(waiting.content, waiting.reply, fault)
        else:
            self._instance.accept(waiting.content, waiting.reply)
            self._channel.send(Entered(waiting.id))

    def _may_enter(self) -> bool:
        return bool(self._waiting) and (self._most is None or self._instance.has_room())

    def _take_faults(self) -> list[tuple[Waiting, RequestError]]:
        faults = [(w, fault) for w in self._waiting if (fault := w.fault()) is not None]
        gone = {waiting.id for waiting, _ in faults}
        self._waiting = deque(w for w in self._waiting if w.id not in gone)
        return faults

    def _count(self) -> None:
        self._instance.set_queued(len(self._waiting))
