"""The blocking client."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from sangam_client import wire
from sangam_client.wire import Chunk, Completion, Prompt, SangamError


class Client:
    """Any number of threads may share one.

    tritonclient's own client allows one stream per object; the generated stub beneath it opens a
    gRPC stream per request on one connection.
    """

    def __init__(self, url: str = "localhost:8001", model: str = "sangam") -> None:
        self._model = model
        self._closed = False
        self._channel = grpc.insecure_channel(url, options=wire.CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

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
        call = self._open_stub().ModelStreamInfer(iter((request,)), timeout=timeout)
        try:
            for response in call:
                chunk = wire.parse_response(response)
                if chunk.final:
                    # Triton is closing the stream: a cancel that meets its last write may crash it.
                    deque(call, maxlen=0)
                    yield chunk
                    return
                yield chunk
            raise SangamError(wire.NO_FINAL_RESPONSE)
        except grpc.RpcError as error:
            raise wire.transport_error(error, timeout) from error
        finally:
            call.cancel()

    def _open_stub(self) -> Any:
        if self._closed:
            raise SangamError(wire.CLOSED)
        return self._stub

    def is_ready(self) -> bool:
        """Whether the model can take requests; a server that cannot be reached is not ready."""
        try:
            return bool(
                self._open_stub().ModelReady(service_pb2.ModelReadyRequest(name=self._model)).ready
            )
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return False
            raise wire.transport_error(error, None) from error

    def close(self) -> None:
        """Cancels what is still running."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
