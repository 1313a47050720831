"""Each bad request gets one clear error, and the good request beside it notices nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from server.harness import CHAT, GOOD, Serving, Stream, raw_tensor, serving

BAD_UTF8 = b"caf\xe9"


def sampling(**values: Any) -> dict[str, Any]:
    return {"messages": CHAT, "sampling_parameters": values}


def ints(values: Any) -> Any:
    return raw_tensor("input_ids", "INT32", np.array(values, dtype=np.int32))


@pytest.fixture
def neighbour(server: Serving, good_ids: list[int]) -> Iterator[None]:
    """A good stream that runs while the test does, and must end as if alone."""
    stream = Stream(server.grpc_url)
    stream.send({"messages": CHAT, "stream": True, "sampling_parameters": GOOD})
    yield
    answer = stream.receive()
    stream.close()
    assert (answer.error, answer.ids) == (None, good_ids)


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "empty text": ({"text_input": ""}, "the prompt is empty"),
    "empty chat": ({"messages": "[]"}, "the prompt is empty"),
    "empty ids": ({"input_ids": ints([])}, "the prompt is empty"),
    "two forms": ({"text_input": "a", "messages": CHAT}, "found text_input and messages"),
    "all forms": (
        {"text_input": "a", "messages": CHAT, "input_ids": [1]},
        "exactly one of text_input, messages, input_ids must be given, "
        "found text_input and messages and input_ids",
    ),
    "no form": ({"stream": True}, "exactly one of text_input, messages, input_ids must be given"),
    "id too large": ({"input_ids": [5, 832]}, "input_ids[1] is 832, must be an integer from 0 to"),
    "id negative": ({"input_ids": [-1]}, "input_ids[0] is -1, must be an integer from 0 to 831"),
    "max_tokens 0": (sampling(max_tokens=0), "max_tokens is 0, must be from 1 to 2048"),
    "max_tokens -1": (sampling(max_tokens=-1), "max_tokens is -1, must be from 1 to 2048"),
    "max_tokens 1e9": (sampling(max_tokens=10**9), "max_tokens is 1000000000, must be from 1 to"),
    "max_tokens abc": (sampling(max_tokens="abc"), "max_tokens is 'abc', must be an integer"),
    "max_tokens input": ({"messages": CHAT, "max_tokens": 0}, "max_tokens is 0, must be from 1"),
    "min_length": (
        {"messages": CHAT, "max_tokens": 8, "min_length": 9},
        "min_tokens is 9, must be from 0 to 8",
    ),
    "unknown key": (sampling(max_token=5), "unknown sampling parameter 'max_token', known are max"),
    "threshold 2": (
        sampling(confidence_threshold=2),
        "confidence_threshold is 2, must be from 0 to 1",
    ),
    "unknown rule": (sampling(unmasking="best"), "unmasking is 'best', must be one of threshold"),
    "nan": (sampling(temperature=float("nan")), "temperature is nan, must be from 0 to 100"),
    "stop": (sampling(stop=[""]), "stop is [''], must be a list of strings that are not empty"),
    "malformed JSON": (
        {"messages": CHAT, "sampling_parameters": '{"max_tokens": 5'},
        "sampling_parameters is not valid JSON: ",
    ),
    "JSON list": (
        {"messages": CHAT, "sampling_parameters": "[5]"},
        "sampling_parameters must be a JSON object, not list",
    ),
    "deep JSON": (
        {"messages": CHAT, "sampling_parameters": "[" * 100_000},
        "maximum recursion depth exceeded",
    ),
    "too long": (
        {"input_ids": [7] * 2000, "max_tokens": 49},
        "prompt of 2000 tokens and max_tokens 49 (a canvas of 64 in blocks of 32) exceed the limit "
        "of 2048 tokens",
    ),
    "text not UTF-8": ({"text_input": BAD_UTF8}, "text_input is not valid UTF-8"),
    "messages not UTF-8": ({"messages": BAD_UTF8}, "messages is not valid UTF-8"),
    "JSON not UTF-8": (
        {"messages": CHAT, "sampling_parameters": BAD_UTF8},
        "sampling_parameters is not valid UTF-8",
    ),
    "messages not JSON": ({"messages": "hello"}, "messages is not valid JSON"),
    "messages an object": ({"messages": '{"role": 1}'}, "messages must be a JSON list, not dict"),
    "message a string": (
        {"messages": ["hello"]},
        "messages[0] must be an object with strings role and content",
    ),
    "no content": (
        {"messages": [*CHAT, {"role": "user"}]},
        "messages[1] must be an object with strings role and content",
    ),
    "half a surrogate": (
        {"messages": '[{"role": "user", "content": "\\ud800"}]'},
        "messages cannot be rendered: ",
    ),
}
# Triton itself compares these with config.pbtxt.
REFUSED_BY_TRITON: dict[str, tuple[dict[str, Any], str]] = {
    "dtype": (
        {"input_ids": raw_tensor("input_ids", "INT64", np.array([1, 2], dtype=np.int64))},
        "'input_ids' data-type is 'INT64', but model 'sangam' expects 'INT32'",
    ),
    "text as ids": (
        {"text_input": raw_tensor("text_input", "INT32", np.array([1], dtype=np.int32))},
        "'text_input' data-type is 'INT32', but model 'sangam' expects 'BYTES'",
    ),
    "shape of text": (
        {"text_input": raw_tensor("text_input", "BYTES", np.array([b"a", b"b"], dtype=np.object_))},
        "unexpected shape for input 'text_input' for model 'sangam'. Expected [1], got [2]",
    ),
    "shape of ids": ({"input_ids": ints([[1, 2]])}, "unexpected shape for input 'input_ids'"),
    "unknown input": ({"text": "a"}, "unexpected inference input 'text'"),
}


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize("case", CASES)
def test_refused(server: Serving, case: str) -> None:
    inputs, message = CASES[case]
    answer = server.ask(inputs)
    assert answer.error is not None
    assert answer.error.startswith("[INVALID_ARG] ")
    assert message in answer.error
    assert "\n" not in answer.error
    assert len(answer.error) < 500
    assert (answer.pieces, answer.finals) == ([], 0)


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize("case", REFUSED_BY_TRITON)
def test_refused_by_triton(server: Serving, case: str) -> None:
    inputs, message = REFUSED_BY_TRITON[case]
    answer = server.ask(inputs)
    assert answer.error is not None
    assert message in answer.error
    assert answer.pieces == []


@pytest.mark.usefixtures("neighbour")
def test_unknown_request_parameter(server: Serving) -> None:
    answer = server.ask({"messages": CHAT}, {"max_token": 4})
    assert answer.error is not None
    assert "unknown sampling parameter 'max_token', known are max_tokens" in answer.error


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"text_input": "a", "max_tokens": 0}, "[INVALID_ARG] max_tokens is 0, must be from 1"),
        ({"text_input": "a", "top": 1}, "[INVALID_ARG] unknown sampling parameter 'top'"),
        ({}, "[INVALID_ARG] exactly one of text_input, messages, input_ids must be given"),
        (b'{"text_input":', "failed to parse the request JSON buffer"),
        (b"[1, 2]", "non-object"),
        ({"text_input": ["a", "b"]}, "text_input"),
    ],
)
def test_refused_over_http(server: Serving, body: Any, message: str) -> None:
    status, answer = server.generate(body)
    assert status in (400, 500)  # Triton calls what it cannot parse its own error
    assert message in json.loads(answer)["error"]


def test_a_stream_goes_on_after_an_error(server: Serving) -> None:
    stream = Stream(server.grpc_url)
    stream.send(sampling(max_tokens=0))
    assert stream.receive().error is not None
    stream.send(sampling(max_tokens=5))
    assert stream.receive().text == "e s u o h"
    stream.close()


def test_larger_than_the_pool(tmp_path_factory: pytest.TempPathFactory) -> None:
    log = tmp_path_factory.mktemp("small") / "log"
    with serving(log, "--kv-cache-tokens", "160") as server:
        answer = server.ask({"input_ids": [7] * 100, "max_tokens": 65})
        assert answer.error == (
            "[INVALID_ARG] prompt of 100 tokens and max_tokens 65 (a canvas of 96 in blocks of 32) "
            "exceed the limit of 160 tokens"
        )
        fitting = server.ask({"input_ids": [7] * 96, "max_tokens": 64})
        assert fitting.error is None
