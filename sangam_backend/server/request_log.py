"""What an instance writes of its requests into the event log, if it keeps one."""

from __future__ import annotations

import time
from typing import Any

from sangam_backend.event_log import EventLog, RequestRow
from sangam_backend.request import Request, RequestError
from sangam_backend.server.options import Incoming


class RequestLog:
    def __init__(self, event_log: EventLog | None) -> None:
        self._event_log = event_log
        self._first_text: dict[Request, float] = {}

    def saw_text(self, request: Request, now: float) -> None:
        """Tokens of it are sent, perhaps the first."""
        if self._event_log is not None:
            self._first_text.setdefault(request, now)

    def add_end(self, request: Request, outcome: str, block: int | None = None) -> None:
        """A request that has ended, or of a decode instance a block."""
        first_text = self._first_text.pop(request, None)
        if (event_log := self._event_log) is None:
            return
        began = request.began
        start = 0 if block is None else block * request.params.block_length
        event_log.add(
            RequestRow(
                request_id=request.request_id,
                trace_id=request.trace_id,
                block=block,
                arrival=event_log.wall(request.arrival),
                queue_seconds=None if began is None else round(began - request.arrival, 6),
                prompt_tokens=len(request.prompt),
                generated_tokens=max(0, request.prefix - start),
                forwards=request.num_forwards,
                prefills=request.num_prefills,
                first_text=None if first_text is None else event_log.wall(first_text),
                end=event_log.wall(time.monotonic()),
                outcome=outcome,
            )
        )

    def add_refusal(self, content: Any, error: RequestError) -> None:
        """A request that has not come as far as the engine."""
        if (event_log := self._event_log) is None or not isinstance(content, Incoming):
            return
        now = event_log.wall(time.monotonic())
        event_log.add(
            RequestRow(
                request_id=content.request_id,
                trace_id=content.trace_id,
                block=None,
                arrival=now,
                queue_seconds=None,
                prompt_tokens=None,
                generated_tokens=0,
                forwards=0,
                prefills=0,
                first_text=None,
                end=now,
                outcome=error.code.value.lower(),
            )
        )

    def close(self) -> None:
        if self._event_log is not None:
            self._event_log.close()
