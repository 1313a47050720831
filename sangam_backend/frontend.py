"""From what a client sends to a request of the engine: prompt forms, checks, defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sangam_backend.config import MAX_BLOCK_LENGTH, EngineConfig, ModelConfig
from sangam_backend.handover import Handover
from sangam_backend.models import find_checkpoint
from sangam_backend.models.transformer import Transformer
from sangam_backend.parameters import Limits, invalid, parse_sampling
from sangam_backend.prompt import Prompt
from sangam_backend.request import Request, SamplingParams
from sangam_backend.text import TextStream, Tokenizer

MAX_CHARACTERS_PER_TOKEN = 128


@dataclass(frozen=True, slots=True)
class Frontend:
    """Knows the checkpoint's tokenizer and the instance's limits."""

    model: ModelConfig
    tokenizer: Tokenizer | None
    limits: Limits

    def new_request(
        self, request_id: str, prompt: Prompt, sampling: Mapping[str, Any], stream: bool
    ) -> Request:
        """Tokenises the prompt and checks it and the sampling parameters.

        Raises:
            RequestError: the message names the field, its value and the limit.
        """
        ids = self.encode(prompt)
        params = parse_sampling(sampling, ids, self.limits)
        return self._make(request_id, ids, params, stream)

    def restore_request(self, handover: Handover, stream: bool) -> Request:
        """The request of a handover, as it stands there."""
        request = self._make(handover.request_id, handover.prompt, handover.params, stream)
        request.arrival = handover.arrival
        request.trace_id = handover.trace_id
        request.resume(handover.canvas, handover.num_forwards)
        return request

    def _make(
        self, request_id: str, prompt: list[int], params: SamplingParams, stream: bool
    ) -> Request:
        return Request(
            request_id=request_id,
            prompt=prompt,
            params=params,
            stop_token_ids=self.model.stop_token_ids,
            mask_token_id=self.model.mask_token_id,
            text=TextStream(self.tokenizer, params.stop) if self.tokenizer else None,
            stream=stream,
        )

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt in any form, at least one of them."""
        if prompt.input_ids is not None:
            self._check_length(prompt.input_ids)
            ids = _check_ids(prompt.input_ids, self.model.vocab_size)
        elif self.tokenizer is None:
            raise invalid("this checkpoint has no tokenizer, so the prompt must be input_ids")
        elif prompt.text_input is not None:
            ids = self._encode_text(self.tokenizer, prompt.text_input)
        else:
            ids = self._encode_chat(self.tokenizer, prompt.messages or [])
        if not ids:
            raise invalid("the prompt is empty, at least one token is needed")
        self._check_length(ids)
        return ids

    def _check_length(self, ids: list[int]) -> None:
        if len(ids) > (limit := self.limits.max_prompt_tokens):
            raise invalid(f"the prompt is {len(ids)} tokens long, the limit is {limit} tokens")

    def _check_characters(self, name: str, count: int) -> None:
        """Spares the tokenizer what is far too long in any case."""
        if count > (limit := MAX_CHARACTERS_PER_TOKEN * self.limits.max_prompt_tokens):
            raise invalid(f"{name} is {count} characters long, the limit is {limit} characters")

    def _encode_text(self, tokenizer: Tokenizer, text: str) -> list[int]:
        self._check_characters("text_input", len(text))
        try:
            return tokenizer.encode(text)
        except ValueError as error:
            raise invalid(f"text_input cannot be tokenised: {error}") from None

    def _encode_chat(self, tokenizer: Tokenizer, messages: list[Any]) -> list[int]:
        for index, message in enumerate(messages):
            fields = message if isinstance(message, dict) else {}
            if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
                raise invalid(f"messages[{index}] must be an object with strings role and content")
        contents = sum(len(message["role"] + message["content"]) for message in messages)
        self._check_characters("messages", contents)
        try:
            return tokenizer.encode_chat(messages) if messages else []
        except ValueError as error:
            raise invalid(f"messages cannot be rendered: {error}") from None


def open_frontend(model: Transformer, config: EngineConfig, pool_tokens: int) -> Frontend:
    """The frontend of a loaded model; the tokenizer's turn end joins the model's stop tokens."""
    directory = find_checkpoint(config.model, config.load_format)
    tokenizer = Tokenizer.load(directory, model.config.family)
    if tokenizer is not None:
        stops = model.config.stop_token_ids | tokenizer.stop_ids
        model.config = dataclasses.replace(model.config, stop_token_ids=stops)
    max_sequence_length = min(model.config.max_sequence_length, pool_tokens)
    limits = Limits(
        family=model.config.family,
        block_length=config.block_length,
        max_block_length=MAX_BLOCK_LENGTH,
        max_sequence_length=max_sequence_length,
        max_prompt_tokens=config.max_prompt_tokens or max_sequence_length,
        max_output_tokens=config.max_output_tokens or max_sequence_length,
        has_tokenizer=tokenizer is not None,
    )
    return Frontend(model.config, tokenizer, limits)


def _check_ids(ids: list[Any], vocab_size: int) -> list[int]:
    for index, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise invalid(
                f"input_ids[{index}] is {token!r}, must be an integer from 0 to {vocab_size - 1}"
            )
    return ids
