"""Triton's tensors and parameters to plain values, and plain values back."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from sangam_backend.parameters import invalid, parse_json
from sangam_backend.prompt import Prompt, parse_messages
from sangam_backend.request import RequestError
from sangam_backend.server.options import Incoming, Options
from sangam_backend.trace_context import TRACEPARENT, trace_id_of

# Request parameters that Triton, its clients and its HTTP endpoint add for themselves.
TRANSPORT_PARAMETERS = frozenset(
    ("id", "timeout", "priority", "sequence_id", "sequence_start", "sequence_end")
    + ("binary_data_output", "headers", TRACEPARENT)
)
TRANSPORT_PREFIX = "triton_"


def read_request(request: Any, longest: float) -> Incoming:
    """Reads the inputs of a Triton request, which may take `longest` seconds.

    Raises:
        RequestError: a malformed input; the message names it.
    """
    messages = _string(request, "messages")
    ids = pb_utils.get_input_tensor_by_name(request, "input_ids")
    prompt = Prompt(
        input_ids=None if ids is None else ids.as_numpy().reshape(-1).tolist(),
        text_input=_string(request, "text_input"),
        messages=None if messages is None else parse_messages(messages),
    )
    return Incoming(
        request_id=request.request_id(),
        prompt=prompt,
        sampling=_sampling(request),
        options=_options(request, prompt),
        deadline=_deadline(request, longest),
        trace_id=_trace_id(request),
    )


def read_handover(request: Any) -> bytes:
    value = _scalar(request, "handover")
    if not isinstance(value, bytes):
        raise invalid("handover is missing")
    return value


def build_response(outputs: Mapping[str, Any]) -> Any:
    return pb_utils.InferenceResponse([_tensor(name, value) for name, value in outputs.items()])


def build_error(error: RequestError) -> Any:
    # Clients of the gRPC stream see the message alone, so it begins with the code.
    message = f"[{error.code.value}] {error}"
    code = getattr(pb_utils.TritonError, error.code.value)
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))


def _sampling(request: Any) -> dict[str, Any]:
    """Request parameters, then the INT32 inputs, then the JSON, each over the one before."""
    parameters = json.loads(request.parameters() or "{}")
    sampling = {
        name: value
        for name, value in parameters.items()
        if name not in TRANSPORT_PARAMETERS and not name.startswith(TRANSPORT_PREFIX)
    }
    for tensor, name in (("max_tokens", "max_tokens"), ("min_length", "min_tokens")):
        if (value := _scalar(request, tensor)) is not None:
            sampling[name] = int(value)
    if (text := _string(request, "sampling_parameters")) is not None:
        sampling |= parse_json(text)
    return sampling


def _deadline(request: Any, longest: float) -> float:
    """From the timeout in microseconds, which gRPC and HTTP bring on different ways."""
    timeout = request.timeout() or json.loads(request.parameters() or "{}").get("timeout") or 0
    try:
        microseconds = int(timeout)
    except (TypeError, ValueError):
        raise invalid(f"timeout is {timeout!r}, must be an integer of microseconds") from None
    if microseconds < 0:
        raise invalid(f"timeout is {microseconds}, must not be negative")
    return time.monotonic() + min(microseconds / 1e6 or longest, longest)


def _trace_id(request: Any) -> str:
    return trace_id_of(json.loads(request.parameters() or "{}").get(TRACEPARENT))


def _options(request: Any, prompt: Prompt) -> Options:
    stream = bool(_scalar(request, "stream"))
    exclude = _scalar(request, "exclude_input_in_output")
    # As in Triton's vLLM backend: without a stream a text prompt comes back before its answer.
    echo = not stream if exclude is None else not exclude
    if echo and stream:
        raise invalid("exclude_input_in_output is false, must be true when stream is true")
    return Options(
        stream=stream,
        echo=prompt.text_input or "" if echo else "",
        return_finish_reason=bool(_scalar(request, "return_finish_reason")),
        return_num_input_tokens=bool(_scalar(request, "return_num_input_tokens")),
        return_num_output_tokens=bool(_scalar(request, "return_num_output_tokens")),
        return_num_forwards=bool(_scalar(request, "return_num_forwards")),
    )


def _scalar(request: Any, name: str) -> Any:
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy().reshape(-1)[0]


def _string(request: Any, name: str) -> str | None:
    value = _scalar(request, name)
    if value is None:
        return None
    try:
        return str(value.decode()) if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise invalid(f"{name} is not valid UTF-8: {error}") from None


def _tensor(name: str, value: Any) -> Any:
    if isinstance(value, str | bytes):
        data = value.encode() if isinstance(value, str) else value
        return pb_utils.Tensor(name, np.array([data], dtype=np.object_))
    if isinstance(value, int):
        return pb_utils.Tensor(name, np.array([value], dtype=np.uint32))
    return pb_utils.Tensor(name, np.array(value, dtype=np.int32))
