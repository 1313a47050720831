"""Whether the instances of a server are alive, seen from outside.

Triton 24.10 calls a model ready whose stub has died or hangs, and never ends its requests. An
engine process is watched by its stub, a stub by what this module reads.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from sangam_backend.processes import FROZEN_SECONDS, children, is_running

UPTIME = re.compile(r"(?m)^(sangam_uptime_seconds\{.*\}) (\S+)$")
INSTANCE = re.compile(r'instance="([^"]*)"')


class Watch:
    """Of one tritonserver that is ready."""

    def __init__(self, server: int, read_metrics: Callable[[], str]) -> None:
        """`read_metrics` returns the text of /metrics, empty when the server does not answer."""
        self._stubs = children(server)
        self._read_metrics = read_metrics
        self._uptimes: dict[str, str] = {}
        self._heard: dict[str, float] = {}
        self._answered = time.monotonic()

    def has_lost_a_stub(self) -> bool:
        return not all(map(is_running, self._stubs))

    def silence(self) -> str | None:
        """Who has given no sign for FROZEN_SECONDS, if anybody. Reads the metrics."""
        now = time.monotonic()
        readings = UPTIME.findall(self._read_metrics())
        if readings:
            self._answered = now
        for series, uptime in readings:
            if self._uptimes.get(series) != uptime:
                self._uptimes[series], self._heard[series] = uptime, now
        if now - self._answered > FROZEN_SECONDS:
            return "the server"
        silent = (series for series, heard in self._heard.items() if now - heard > FROZEN_SECONDS)
        return next((f"instance {INSTANCE.findall(series)[0]}" for series in silent), None)
