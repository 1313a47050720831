"""How requests and responses look on the wire; shared by the two clients."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from tritonclient.grpc import InferResult, service_pb2

T = TypeVar("T")
Prompt = str | Sequence[int] | list[dict[str, str]]

NO_FINAL_RESPONSE = "the server closed the stream before the final response of the request"
UNAVAILABLE = re.compile(
    r"(in ensemble '\w+', )?"
    r"(\[UNAVAILABLE\]|Request for unknown model: '\w+' has no available|Stub process '\w+' )"
)
"""How errors of a server begin that stops, or has lost an instance."""


class SangamError(Exception):
    """A request that failed, in the server or on the way to it."""

    def __init__(self, message: str, *, unavailable: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.unavailable = unavailable
        """Whether another server, or this one later, may answer the same request."""


@dataclass(frozen=True, slots=True)
class Chunk:
    text: str
    output_ids: list[int]
    finish_reason: str | None
    num_input_tokens: int | None
    num_output_tokens: int | None  # of this chunk alone
    num_forwards: int | None  # of the answer so far
    final: bool


@dataclass(frozen=True, slots=True)
class Completion:
    text: str
    output_ids: list[int]
    finish_reason: str | None
    num_input_tokens: int | None
    num_output_tokens: int | None
    num_forwards: int | None


def infer_request(
    model: str, prompt: Prompt, request_id: str, sampling: dict[str, Any], *, stream: bool
) -> Any:
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    # Without it a request that ends with an empty final response would never seem to end.
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    _add_prompt(request, prompt)
    if sampling:
        _add_string(request, "sampling_parameters", json.dumps(sampling))
    _add_flag(request, "stream", stream)
    _add_flag(request, "exclude_input_in_output", True)
    for output in ("finish_reason", "num_input_tokens", "num_output_tokens", "num_forwards"):
        _add_flag(request, f"return_{output}", True)
    return request


def _add_prompt(request: Any, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        _add_string(request, "text_input", prompt)
    elif len(prompt) > 0 and isinstance(prompt[0], dict):
        _add_string(request, "messages", json.dumps(prompt))
    else:
        tensor = request.inputs.add(name="input_ids", datatype="INT32", shape=[len(prompt)])
        tensor.contents.int_contents.extend(prompt)


def _add_string(request: Any, name: str, value: str) -> None:
    tensor = request.inputs.add(name=name, datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(value.encode())


def _add_flag(request: Any, name: str, value: bool) -> None:
    tensor = request.inputs.add(name=name, datatype="BOOL", shape=[1])
    tensor.contents.bool_contents.append(value)


def parse_response(response: Any) -> Chunk:
    if response.error_message:
        unavailable = UNAVAILABLE.match(response.error_message) is not None
        raise SangamError(response.error_message, unavailable=unavailable)
    result = InferResult(response.infer_response)
    return Chunk(
        text=b"".join(_values(result, "text_output")).decode(),
        output_ids=_values(result, "output_ids"),
        finish_reason=b"".join(_values(result, "finish_reason")).decode() or None,
        num_input_tokens=_last(_values(result, "num_input_tokens")),
        num_output_tokens=_total(_values(result, "num_output_tokens")),
        num_forwards=_last(_values(result, "num_forwards")),
        final=response.infer_response.parameters["triton_final_response"].bool_param,
    )


def _values(result: Any, name: str) -> list[Any]:
    array = result.as_numpy(name)
    return [] if array is None else list(array.reshape(-1).tolist())


def join(chunks: Iterable[Chunk]) -> Completion:
    got = list(chunks)
    return Completion(
        text="".join(chunk.text for chunk in got),
        output_ids=[token for chunk in got for token in chunk.output_ids],
        finish_reason=_last([chunk.finish_reason for chunk in got]),
        num_input_tokens=_last([chunk.num_input_tokens for chunk in got]),
        num_output_tokens=_total([chunk.num_output_tokens for chunk in got]),
        num_forwards=_last([chunk.num_forwards for chunk in got]),
    )


def _last(values: Iterable[T | None]) -> T | None:
    known = [value for value in values if value is not None]
    return known[-1] if known else None


def _total(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def transport_error(error: Any, timeout: float | None) -> SangamError:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and timeout is not None:
        return SangamError(f"timed out after {timeout:g} s")
    # Triton's answer to a wrong key has that code too.
    refused = str(error.details()).startswith("This protocol is restricted")
    unavailable = error.code() is grpc.StatusCode.UNAVAILABLE and not refused
    return SangamError(f"{error.code().name}: {error.details()}", unavailable=unavailable)
