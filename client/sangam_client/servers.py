"""Where requests go; shared by the two clients."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from tritonclient.grpc import service_pb2_grpc

from sangam_client.wire import SangamError

CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # gRPC waits up to two minutes between attempts otherwise, so a server that starts is seen late.
    ("grpc.max_reconnect_backoff_ms", 1000),
]
CLOSED = "the client is closed"
ROUND_SECONDS = 0.1


class Attempts:
    """Of one request, until a server has begun to answer it."""

    def __init__(
        self, first: int, servers: int, timeout: float | None, retry_seconds: float
    ) -> None:
        self.timeout = timeout
        self.answered = False
        self._server = first
        self._servers = servers
        self._failed = 0
        self._start = time.monotonic()
        self._retry_seconds = retry_seconds

    @property
    def server(self) -> int:
        return (self._server + self._failed) % self._servers

    @property
    def seconds_left(self) -> float | None:
        return None if self.timeout is None else self.timeout - self._elapsed()

    def pause_after(self, error: SangamError) -> float | None:
        """Seconds to wait before the next attempt; None when there is to be none."""
        self._failed += 1
        if self.answered or not error.unavailable:
            return None
        if self._failed % self._servers:
            return 0.0
        return ROUND_SECONDS if self._elapsed() + ROUND_SECONDS <= self._retry_seconds else None

    def _elapsed(self) -> float:
        return time.monotonic() - self._start


class ServersClient:
    """Sends requests to one server, or to several in turn."""

    _grpc: Any = grpc

    def __init__(
        self,
        url: str | Sequence[str] = "localhost:8001",
        model: str = "sangam",
        *,
        retry_seconds: float = 0.0,
        credentials: grpc.ChannelCredentials | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            url: `host:port`, or a list of them. A request that a server cannot take, or loses
                before its first text, goes to the next one.
            retry_seconds: How long after the last of them it begins anew with the first.
            credentials: For TLS.
            headers: Sent with every call; their names are in lower case.
        """
        urls = [url] if isinstance(url, str) else url
        if not urls:
            raise ValueError("url is an empty list, must name a server at least")
        self._model = model
        self._retry_seconds = retry_seconds
        self._metadata = tuple((headers or {}).items())
        self._channels = [self._open_channel(each, credentials) for each in urls]
        self._stubs = [service_pb2_grpc.GRPCInferenceServiceStub(each) for each in self._channels]
        self._turns = itertools.count()
        self._closed = False

    def _open_channel(self, url: str, credentials: grpc.ChannelCredentials | None) -> Any:
        if credentials is None:
            return self._grpc.insecure_channel(url, options=CHANNEL_OPTIONS)
        return self._grpc.secure_channel(url, credentials, options=CHANNEL_OPTIONS)

    def _new_attempts(self, timeout: float | None) -> Attempts:
        return Attempts(next(self._turns), len(self._stubs), timeout, self._retry_seconds)

    def _call(self, request: Any, attempts: Attempts) -> Any:
        """Opens a stream for one request."""
        return self._open_stubs()[attempts.server].ModelStreamInfer(
            iter((request,)), timeout=attempts.seconds_left, metadata=self._metadata
        )

    def _open_stubs(self) -> list[Any]:
        if self._closed:
            raise SangamError(CLOSED)
        return self._stubs
