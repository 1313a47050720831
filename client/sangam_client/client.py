"""The blocking client."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from sangam_client import wire
from sangam_client.servers import Attempts, ServersClient
from sangam_client.wire import Chunk, Completion, Prompt, SangamError


class Client(ServersClient):
    """Any number of threads may share one.

    tritonclient's own client allows one stream per object; the generated stub beneath it opens a
    gRPC stream per request on one connection.
    """

    def stream(
        self, prompt: Prompt, *, request_id: str = "", timeout: float | None = None, **sampling: Any
    ) -> Generator[Chunk, None, None]:
        """Sends the request when the first chunk is asked for; closing the iterator cancels it."""
        request = wire.infer_request(self._model, prompt, request_id, sampling, stream=True)
        return self._run(request, timeout)

    def generate(
        self, prompt: Prompt, *, request_id: str = "", timeout: float | None = None, **sampling: Any
    ) -> Completion:
        request = wire.infer_request(self._model, prompt, request_id, sampling, stream=False)
        return wire.join(self._run(request, timeout))

    def _run(self, request: Any, timeout: float | None) -> Generator[Chunk, None, None]:
        attempts = self._new_attempts(timeout)
        while True:
            try:
                yield from self._attempt(request, attempts)
                return
            except SangamError as error:
                pause = attempts.pause_after(error)
                if pause is None:
                    raise
            time.sleep(pause)

    def _attempt(self, request: Any, attempts: Attempts) -> Generator[Chunk, None, None]:
        call = self._call(request, attempts)
        try:
            for response in call:
                chunk = wire.parse_response(response)
                attempts.answered = True
                if chunk.final:
                    # Triton is closing the stream: a cancel that meets its last write may crash it.
                    deque(call, maxlen=0)
                    yield chunk
                    return
                yield chunk
            raise SangamError(wire.NO_FINAL_RESPONSE, unavailable=True)
        except grpc.RpcError as error:
            raise wire.transport_error(error, attempts.timeout) from error
        finally:
            call.cancel()

    def is_ready(self) -> bool:
        """Whether a server's model takes requests; one that cannot be reached does not."""
        return any(map(self._is_ready, self._open_stubs()))

    def _is_ready(self, stub: Any) -> bool:
        request = service_pb2.ModelReadyRequest(name=self._model)
        try:
            return bool(stub.ModelReady(request, metadata=self._metadata).ready)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return False
            raise wire.transport_error(error, None) from error

    def close(self) -> None:
        """Cancels what is still running."""
        self._closed = True
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
