"""Sampling parameters and prompts: defaults, coercion, and an error for each bad value."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sangam_backend.parameters import Limits, parse_json, parse_sampling
from sangam_backend.prompt import Prompt, parse_messages
from sangam_backend.request import ErrorCode, RequestError, SamplingParams
from sangam_backend.rules import Confidence, Unmasking

LLADA = Limits(
    family="llada",
    block_length=32,
    max_block_length=128,
    max_sequence_length=512,
    max_prompt_tokens=512,
    max_output_tokens=512,
    has_tokenizer=True,
)
DREAM = replace(LLADA, family="dream")


def parse(values: dict[str, Any], limits: Limits = LLADA) -> SamplingParams:
    return parse_sampling(values, [1, 2, 3], limits)


def test_defaults() -> None:
    params = parse({})
    assert (params.max_tokens, params.canvas_length, params.temperature) == (256, 256, 0.0)
    assert (params.unmasking, params.confidence_threshold) == (Unmasking.THRESHOLD, 0.9)
    assert (params.top_p, params.top_k, params.steps) == (1.0, 0, 256)
    assert parse({}).seed == params.seed != parse_sampling({}, [4], LLADA).seed


def test_strings_are_taken_as_values() -> None:
    params = parse(
        {
            "max_tokens": "12",
            "temperature": "0.5",
            "ignore_eos": "true",
            "stop": "end",
            "top_k": 3.0,
        }
    )
    assert (params.max_tokens, params.temperature, params.ignore_eos) == (12, 0.5, True)
    assert (params.stop, params.top_k, params.canvas_length) == (("end",), 3, 32)


def test_dream_ranks_its_schedule_by_entropy() -> None:
    assert parse({"unmasking": "steps"}, DREAM).confidence is Confidence.ENTROPY
    assert parse({"unmasking": "steps"}, LLADA).confidence is Confidence.PROBABILITY
    assert parse({}, DREAM).confidence is Confidence.PROBABILITY


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_token": 3}, "unknown sampling parameter 'max_token', known are max_tokens, "),
        ({"max_tokens": 0}, "max_tokens is 0, must be from 1 to 512"),
        ({"max_tokens": -1}, "max_tokens is -1, must be from 1 to 512"),
        ({"max_tokens": 10**9}, "max_tokens is 1000000000, must be from 1 to 512"),
        ({"max_tokens": "abc"}, "max_tokens is 'abc', must be an integer"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5, must be an integer"),
        ({"max_tokens": True}, "max_tokens is True, must be an integer"),
        ({"max_tokens": [3]}, r"max_tokens is \[3\], must be an integer"),
        ({"max_tokens": float("inf")}, "max_tokens is inf, must be an integer"),
        ({"max_tokens": 510}, "prompt of 3 tokens and max_tokens 510 .* limit of 512"),
        ({"min_tokens": 300}, "min_tokens is 300, must be from 0 to 256"),
        ({"temperature": -0.1}, "temperature is -0.1, must be from 0 to 100"),
        ({"temperature": "warm"}, "temperature is 'warm', must be a number"),
        ({"temperature": float("nan")}, "temperature is nan, must be from 0"),
        ({"top_p": 0}, "top_p is 0, must be from 1e-06 to 1"),
        ({"confidence_threshold": 2}, "confidence_threshold is 2, must be from 0 to 1"),
        ({"seed": 2**63}, "seed is 9223372036854775808, must be from 0"),
        ({"unmasking": "all"}, "unmasking is 'all', must be one of threshold, factor, "),
        ({"confidence": ["margin"]}, r"confidence is \['margin'\], must be one of"),
        ({"unmasking": "steps", "steps": 7}, "steps is 7, must be from 8 to 1024"),
        ({"steps": 10**9}, "steps is 1000000000, must be from 8 to 1024"),
        ({"ignore_eos": "maybe"}, "ignore_eos is 'maybe', must be true or false"),
        ({"stop": [""]}, r"stop is \[''\], must be a list of strings that are not empty"),
        ({"stop": ["x"] * 17}, "stop has 17 strings, at most 16"),
        ({"stop": ["x" * 257]}, "stop has a string of 257 characters, the limit is 256"),
        ({"block_length": 0}, "block_length is 0, must be from 1 to 128"),
    ],
)
def test_bad_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as refusal:
        parse(values)
    assert refusal.value.code is ErrorCode.INVALID_ARG


def test_dream_needs_two_steps_a_block() -> None:
    with pytest.raises(RequestError, match="steps is 8, must be from 16"):
        parse({"unmasking": "steps", "steps": 8}, DREAM)


@pytest.mark.parametrize("text", ["{", "[1]", '"x"', "3", "nul"])
def test_json_must_be_an_object(text: str) -> None:
    with pytest.raises(RequestError, match="sampling_parameters"):
        parse_json(text)


def test_prompt_forms() -> None:
    with pytest.raises(RequestError, match="found none"):
        Prompt()
    with pytest.raises(RequestError, match="found text_input and input_ids"):
        Prompt(text_input="", input_ids=[])
    with pytest.raises(RequestError, match="messages is not valid JSON"):
        parse_messages("[")
    with pytest.raises(RequestError, match="messages must be a JSON list, not dict"):
        parse_messages("{}")


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(RequestError) as refused:
        parse({"max_tokens": "9" * 4000})
    assert len(str(refused.value)) < 500
    assert str(refused.value).startswith("max_tokens is 999")
    assert str(refused.value).endswith("999, must be from 1 to 512")


def test_the_longest_output() -> None:
    limits = replace(LLADA, max_output_tokens=64)
    assert parse({}, limits).max_tokens == parse({"max_tokens": 64}, limits).max_tokens == 64
    with pytest.raises(RequestError, match="max_tokens is 65, must be from 1 to 64"):
        parse({"max_tokens": 65}, limits)
