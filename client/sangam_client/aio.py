"""The asyncio client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from sangam_client import wire
from sangam_client.servers import CLOSED, Attempts, ServersClient
from sangam_client.wire import Chunk, Completion, Prompt, SangamError


class AsyncClient(ServersClient):
    """Belongs to the event loop that runs when it is made.

    tritonclient's asyncio client cannot ask for empty final responses, so this one uses the
    generated stub.
    """

    _grpc = grpc.aio

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
        attempts = self._new_attempts(timeout)
        while True:
            try:
                async with aclosing(self._attempt(request, attempts)) as chunks:
                    async for chunk in chunks:
                        yield chunk
                return
            except SangamError as error:
                pause = attempts.pause_after(error)
                if pause is None:
                    raise
            await asyncio.sleep(pause)

    async def _attempt(self, request: Any, attempts: Attempts) -> AsyncGenerator[Chunk, None]:
        call = self._call(request, attempts)
        try:
            async for response in call:
                chunk = wire.parse_response(response)
                attempts.answered = True
                if chunk.final:
                    # Triton is closing the stream: a cancel that meets its last write may crash it.
                    async for _ in call:
                        pass
                    yield chunk
                    return
                yield chunk
            raise SangamError(wire.NO_FINAL_RESPONSE, unavailable=True)
        except grpc.RpcError as error:
            raise wire.transport_error(error, attempts.timeout) from error
        except asyncio.CancelledError:
            # gRPC raises it for calls of a closed channel too, in tasks that nobody cancelled.
            if self._closed:
                raise SangamError(CLOSED) from None
            raise
        finally:
            call.cancel()

    async def is_ready(self) -> bool:
        """Whether a server's model takes requests; one that cannot be reached does not."""
        for stub in self._open_stubs():
            if await self._is_ready(stub):
                return True
        return False

    async def _is_ready(self, stub: Any) -> bool:
        request = service_pb2.ModelReadyRequest(name=self._model)
        try:
            return bool((await stub.ModelReady(request, metadata=self._metadata)).ready)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                return False
            raise wire.transport_error(error, None) from error

    async def close(self) -> None:
        """Cancels what is still running."""
        self._closed = True
        for channel in self._channels:
            await channel.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()
