"""Echoes its prompt through the tensors of `sangam`, so that the clients meet a real server.

A text or chat prompt comes back word by word, with FINAL on the last word; token ids come back one
by one, with FINAL alone at the end. Sampling parameters: `max_tokens`, `delay` (seconds before each
piece), `show` (echo all inputs as JSON instead). As text, "fail" is an error, "fail late" is one
after the first word, and "silent" sends FINAL only.
"""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        self.cancelled = Path(args["model_repository"]) / "cancelled"
        self.cancelled.mkdir()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            inputs = {tensor.name(): readable(tensor.as_numpy()) for tensor in request.inputs()}
            sender, name = request.get_response_sender(), request.request_id()
            threading.Thread(target=self.answer, args=(inputs, sender, name)).start()

    def answer(self, inputs: dict[str, Any], sender: Any, name: str) -> None:
        """The only user of the sender: nothing may touch it after FINAL."""
        try:
            last = echo(inputs, sender)
        except InterruptedError:
            (self.cancelled / (name or "unnamed")).touch()
            last = failure("cancelled", pb.TritonError.CANCELLED)
        except Exception as error:
            last = failure(str(error), pb.TritonError.INVALID_ARG)
        if last is None:
            sender.send(flags=FINAL)
        else:
            sender.send(last, flags=FINAL)


def echo(inputs: dict[str, Any], sender: Any) -> Any:
    """Returns the response that FINAL goes with, or None."""
    sampling = json.loads(inputs.get("sampling_parameters", ["{}"])[0])
    pieces = prompt_pieces(inputs, bool(sampling.get("show")))
    if not pieces:
        return None
    kept = pieces[: sampling.get("max_tokens", len(pieces))]
    groups = [[piece] for piece in kept] if inputs["stream"][0] else [kept]
    for index, group in enumerate(groups):
        for _ in group:
            time.sleep(sampling.get("delay", 0.005))
            if sender.is_cancelled():
                raise InterruptedError
        if index == 1 and pieces == ["fail ", "late"]:
            raise ValueError("broke half-way")
        reason = "stop" if len(kept) == len(pieces) else "length"
        reply = response(group, len(pieces), reason if group is groups[-1] else None)
        if group is groups[-1] and "input_ids" not in inputs:
            return reply
        sender.send(reply)
    return None


def prompt_pieces(inputs: dict[str, Any], show: bool) -> list[Any]:
    if show:
        return [json.dumps(inputs)]
    if "input_ids" in inputs:
        return list(inputs["input_ids"])
    text = inputs["messages" if "messages" in inputs else "text_input"][0]
    if text == "fail":
        raise ValueError("max_tokens: 0 is not in 1..256\nsecond line")
    return [] if text == "silent" else re.findall(r"\S+\s*", text)


def readable(array: Any) -> list[Any]:
    return [item.decode() if isinstance(item, bytes) else item for item in array.tolist()]


def response(pieces: list[Any], num_input_tokens: int, finish_reason: str | None) -> Any:
    words = [piece for piece in pieces if isinstance(piece, str)]
    ids = [len(piece) if isinstance(piece, str) else piece for piece in pieces]
    outputs = {
        "text_output": np.array(["".join(words).encode()], dtype=object),
        "output_ids": np.array(ids, dtype=np.int32),
        "num_output_tokens": np.array([len(ids)], dtype=np.uint32),
    }
    if finish_reason is not None:
        outputs["finish_reason"] = np.array([finish_reason.encode()], dtype=object)
        outputs["num_input_tokens"] = np.array([num_input_tokens], dtype=np.uint32)
        outputs["num_forwards"] = np.array([7], dtype=np.uint32)
    return pb.InferenceResponse([pb.Tensor(name, value) for name, value in outputs.items()])


def failure(message: str, code: Any) -> Any:
    return pb.InferenceResponse(error=pb.TritonError(message, code))
