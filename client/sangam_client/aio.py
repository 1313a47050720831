"""The asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from sangam_client import wire
from sangam_client.wire import Chunk, Completion, Prompt, SangamError


class AsyncClient:
    """Belongs to the event loop that runs when it is made.

    tritonclient's asyncio client cannot ask for empty final responses, so this one uses the
    generated stub.
    """

    def __init__(self, url: str = "localhost:8001", model: str = "sangam") -> None:
        self._model = model
        self._closed = False
        self._channel = grpc.aio.insecure_channel(url, options=wire.CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(
        self, prompt: Prompt, *, request_id: str = "", timeout: float | None = None, **sampling: Any
    ) -> AsyncGenerator[Chunk, None]:
        """Sends the request when the first chunk is asked for; closing the iterator cancels it."""
        request = wire.infer_request(self._model, prompt, request_id, sampling, stream=True)
        return self._run(request, timeout)

    async def generate(
        self, prompt: Prompt, *, request_id: str = "", timeout: float | None = None, **sampling: Any
    ) -> Completion:
        request = wire.infer_request(self._model, prompt, request_id, sampling, stream=False)
        return wire.join([chunk async for chunk in self._run(request, timeout)])

    async def _run(self, request: Any, timeout: float | None) -> AsyncGenerator[Chunk, None]:
        call = self._open_stub().ModelStreamInfer(iter((request,)), timeout=timeout)
        try:
            async for response in call:
                chunk = wire.parse_response(response)
                if chunk.final:
                    # Triton is closing the stream: a cancel that meets its last write may crash it.
                    async for _ in call:
                        pass
                    yield chunk
                    return
                yield chunk
            raise SangamError(wire.NO_FINAL_RESPONSE)
        except grpc.RpcError as error:
            raise wire.transport_error(error, timeout) from error
        except asyncio.CancelledError:
            # gRPC raises it for calls of a closed channel too, in tasks that nobody cancelled.
            if self._closed:
                raise SangamError(wire.CLOSED) from None
            raise
        finally:
            call.cancel()

    def _open_stub(self) -> Any:
        if self._closed:
            raise SangamError(wire.CLOSED)
        return self._stub

    async def is_ready(self) -> bool:
        """Whether the model can take requests; a server that cannot be reached is not ready."""
        try:
            reply = await self._open_stub().ModelReady(
                service_pb2.ModelReadyRequest(name=self._model)
            )
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return False
            raise wire.transport_error(error, None) from error
        return bool(reply.ready)

    async def close(self) -> None:
        """Cancels what is still running."""
        self._closed = True
        await self._channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()
