"""A request as it came, and what its client wants to be told."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from sangam_backend.prompt import Prompt
from sangam_backend.request import ErrorCode, Output, Request, RequestError


@dataclass(frozen=True, slots=True)
class Options:
    """How a client wants to be answered."""

    stream: bool
    echo: str
    """Text put before the answer."""
    return_finish_reason: bool
    return_num_input_tokens: bool
    return_num_output_tokens: bool
    return_num_forwards: bool

    def outputs(self, request: Request, output: Output) -> dict[str, Any]:
        """A response's tensors by name: those that the client asked for."""
        outputs: dict[str, Any] = {
            "text_output": self.echo + output.text,
            "output_ids": output.ids,
        }
        if self.return_finish_reason:
            outputs["finish_reason"] = output.finish_reason.value if output.finish_reason else ""
        if self.return_num_input_tokens:
            outputs["num_input_tokens"] = len(request.prompt)
        if self.return_num_output_tokens:
            outputs["num_output_tokens"] = len(output.ids)
        if self.return_num_forwards:
            outputs["num_forwards"] = output.num_forwards
        return outputs


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request as it came, its prompt not yet tokenised."""

    request_id: str
    prompt: Prompt
    sampling: dict[str, Any]
    options: Options
    deadline: float | None
    """On the clock of time.monotonic."""
    trace_id: str
    """Empty where the client sends none."""


def shutting_down() -> RequestError:
    return RequestError(ErrorCode.UNAVAILABLE, "the server is shutting down")


def timed_out() -> RequestError:
    return RequestError(
        ErrorCode.CANCELLED, "the request ran longer than its timeout, or than the server allows"
    )


def fault_in_queue(is_cancelled: bool, deadline: float | None) -> RequestError | None:
    """Why a request that waits need not be let in any more."""
    if is_cancelled:
        return RequestError(ErrorCode.CANCELLED, "cancelled while it waited in the queue")
    return timed_out() if deadline is not None and time.monotonic() > deadline else None
