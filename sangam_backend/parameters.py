"""Sampling parameters from JSON or request parameters, checked field by field."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sangam_backend.config import Family
from sangam_backend.request import ErrorCode, RequestError, SamplingParams
from sangam_backend.rules import Confidence, Unmasking, min_steps_per_block

MAX_SEED = 2**63 - 1
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_STEPS_PER_TOKEN = 4
MAX_MESSAGE_LENGTH = 480

Json = TypeVar("Json", dict[str, Any], list[Any])

KNOWN = [field.name for field in dataclasses.fields(SamplingParams)]


def invalid(message: str) -> RequestError:
    """A refusal; of a long message, which repeats what the client sent, the middle is left out."""
    if len(message) > MAX_MESSAGE_LENGTH:
        half = MAX_MESSAGE_LENGTH // 2
        message = f"{message[:half]} … {message[-half:]}"
    return RequestError(ErrorCode.INVALID_ARG, message)


@dataclass(frozen=True, slots=True)
class Limits:
    """What an instance allows a request to ask for."""

    family: Family
    block_length: int
    max_block_length: int
    max_sequence_length: int
    """Longest prompt plus canvas, by the model and by the KV pool."""
    max_prompt_tokens: int
    max_output_tokens: int
    has_tokenizer: bool


def parse_json(text: str) -> dict[str, Any]:
    """The sampling_parameters input.

    Raises:
        RequestError: not a JSON object.
    """
    return read_json("sampling_parameters", text, dict)


def read_json(name: str, text: str, kind: type[Json]) -> Json:
    """The JSON of an input, which must be an object (dict) or a list.

    Raises:
        RequestError: it is not; the message names the input.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{name} is not valid JSON: {error}") from None
    if not isinstance(value, kind):
        wanted = "object" if kind is dict else "list"
        raise invalid(f"{name} must be a JSON {wanted}, not {type(value).__name__}")
    return value


def parse_sampling(
    values: Mapping[str, Any], prompt: Sequence[int], limits: Limits
) -> SamplingParams:
    """Fills in defaults and checks every value, which may also arrive as a string.

    Raises:
        RequestError: an unknown key, or a value out of its range; the message names them.
    """
    for key in values:
        if key not in KNOWN:
            raise invalid(f"unknown sampling parameter {key!r}, known are {', '.join(KNOWN)}")
    read = _Reader(values)
    block_length = read.integer("block_length", limits.block_length, 1, limits.max_block_length)
    default_tokens = min(256, limits.max_output_tokens)
    max_tokens = read.integer("max_tokens", default_tokens, 1, limits.max_output_tokens)
    _check_length(len(prompt), max_tokens, block_length, limits)
    num_blocks = -(-max_tokens // block_length)
    least_steps = num_blocks * min_steps_per_block(limits.family, block_length)
    most_steps = MAX_STEPS_PER_TOKEN * max(num_blocks * block_length, least_steps)
    unmasking = Unmasking(read.choice("unmasking", "threshold", [rule.value for rule in Unmasking]))
    # Dream's reference ranks by entropy in every fixed schedule, whatever it is told.
    dream_steps = limits.family == "dream" and unmasking is Unmasking.STEPS
    measure = "entropy" if dream_steps else "probability"
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=read.integer("min_tokens", 0, 0, max_tokens),
        temperature=read.number("temperature", 0.0, 0.0, 100.0),
        top_p=read.number("top_p", 1.0, 1e-6, 1.0),
        top_k=read.integer("top_k", 0, 0, 1 << 31),
        seed=read.integer("seed", _seed_of(prompt), 0, MAX_SEED),
        unmasking=unmasking,
        confidence_threshold=read.number("confidence_threshold", 0.9, 0.0, 1.0),
        factor=read.number("factor", 1.0, 0.0, 1e6),
        tokens_per_step=read.integer("tokens_per_step", 1, 1, 1 << 31),
        steps=read.integer("steps", max(max_tokens, least_steps), least_steps, most_steps),
        confidence=Confidence(
            read.choice("confidence", measure, [measure.value for measure in Confidence])
        ),
        stop=read.stop_strings(limits.has_tokenizer),
        ignore_eos=read.boolean("ignore_eos", False),
        block_length=block_length,
    )


def _check_length(prompt: int, max_tokens: int, block_length: int, limits: Limits) -> None:
    canvas = -(-max_tokens // block_length) * block_length
    if prompt + canvas > limits.max_sequence_length:
        raise invalid(
            f"prompt of {prompt} tokens and max_tokens {max_tokens} (a canvas of {canvas} in "
            f"blocks of {block_length}) exceed the limit of {limits.max_sequence_length} tokens"
        )


def _seed_of(prompt: Sequence[int]) -> int:
    digest = hashlib.blake2b(",".join(map(str, prompt)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED


class _Reader:
    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def integer(self, name: str, default: int, low: int, high: int) -> int:
        value = self.values.get(name)
        if value is None:
            return default
        try:
            if isinstance(value, bool) or (isinstance(value, float) and not value.is_integer()):
                raise ValueError
            number = int(value)
        except (TypeError, ValueError, OverflowError):
            raise invalid(f"{name} is {value!r}, must be an integer") from None
        if not low <= number <= high:
            raise invalid(f"{name} is {number}, must be from {low} to {high}")
        return number

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.values.get(name)
        if value is None:
            return default
        try:
            if isinstance(value, bool):
                raise ValueError
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            raise invalid(f"{name} is {value!r}, must be a number") from None
        if math.isnan(number) or not low <= number <= high:
            raise invalid(f"{name} is {number:g}, must be from {low:g} to {high:g}")
        return number

    def boolean(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None:
            return default
        known = {"true": True, "false": False, "1": True, "0": False}
        if (parsed := known.get(str(value).lower())) is None:
            raise invalid(f"{name} is {value!r}, must be true or false")
        return parsed

    def choice(self, name: str, default: str, known: Sequence[str]) -> str:
        value = self.values.get(name)
        if value is None:
            return default
        if value not in known:
            raise invalid(f"{name} is {value!r}, must be one of {', '.join(known)}")
        return str(value)

    def stop_strings(self, has_tokenizer: bool) -> tuple[str, ...]:
        value = self.values.get("stop")
        if value is None:
            return ()
        strings = [value] if isinstance(value, str) else value
        if not isinstance(strings, list) or not all(isinstance(s, str) and s for s in strings):
            raise invalid(f"stop is {value!r}, must be a list of strings that are not empty")
        if len(strings) > MAX_STOP_STRINGS:
            raise invalid(
                f"stop has {len(strings)} strings, at most {MAX_STOP_STRINGS} are allowed"
            )
        if (longest := max(map(len, strings), default=0)) > MAX_STOP_LENGTH:
            raise invalid(
                f"stop has a string of {longest} characters, the limit is {MAX_STOP_LENGTH}"
            )
        if strings and not has_tokenizer:
            raise invalid("stop needs a tokenizer, which this checkpoint lacks")
        return tuple(strings)
