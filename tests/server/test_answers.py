"""What a good request is answered with; the reference is the judge."""

from __future__ import annotations

from typing import Any

import pytest
from server.conftest import Oracle
from server.harness import EVERYTHING, Serving

from sangam_backend.prompt import Prompt

CHAT = [{"role": "user", "content": "Add 4363 and 75."}]
SUM = "3+5=8; 6+7=13; 3+0+1=4; 4+0=4. The sum is 4438."
TEXT = "Sort these numbers: 26, 12, 62."
IDS = [72, 101, 108, 108, 111, 44, 32, 119]
MANY_ANSWERS = [{"role": "user", "content": "Shuffle the letters a c h k m p r t."}]
NOISE = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 48}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [
        (Prompt(messages=CHAT), {}),
        (Prompt(text_input=TEXT), {"ignore_eos": True, "max_tokens": 50}),
        (Prompt(input_ids=IDS), {"ignore_eos": True, "max_tokens": 33}),
    ],
)
def test_prompt_forms(
    server: Serving, oracle: Oracle, prompt: Prompt, sampling: dict[str, Any], stream: bool
) -> None:
    inputs = {name: getattr(prompt, name) for name in ("input_ids", "text_input", "messages")}
    given = {name: value for name, value in inputs.items() if value is not None}
    options = {"stream": stream, "exclude_input_in_output": True}
    answer = server.ask({**given, **options, **EVERYTHING, "sampling_parameters": sampling})
    expected = oracle.answer(prompt, sampling)
    assert expected.finish_reason is not None
    assert (answer.error, answer.finals) == (None, 1)
    assert (answer.text, answer.ids) == (expected.text, expected.ids)
    assert answer.finish_reason == expected.finish_reason.value
    assert all(piece["finish_reason"] == "" for piece in answer.pieces[:-1])
    assert sum(piece["num_output_tokens"] for piece in answer.pieces) == len(expected.ids)
    forwards = [piece["num_forwards"] for piece in answer.pieces]
    assert forwards == sorted(set(forwards))
    assert forwards[-1] == expected.num_forwards
    prompt_length = len(oracle.frontend.encode(prompt))
    assert {piece["num_input_tokens"] for piece in answer.pieces} == {prompt_length}
    if not stream:
        assert len(answer.pieces) == 1


def test_a_chat_ends_at_its_end_of_turn(server: Serving) -> None:
    answer = server.ask({"messages": CHAT, **EVERYTHING})
    assert (answer.text, answer.finish_reason) == (SUM, "stop")
    assert answer.pieces[0]["num_output_tokens"] == len(answer.ids) > 30


def test_a_stream_comes_in_pieces(server: Serving) -> None:
    sampling = {"unmasking": "quota", "ignore_eos": True, "max_tokens": 64}
    answer = server.ask({"messages": CHAT, "stream": True, "sampling_parameters": sampling})
    assert len(answer.pieces) > 8
    assert answer.text.startswith(SUM)


def test_outputs_nobody_asked_for_stay_away(server: Serving) -> None:
    answer = server.ask({"messages": CHAT})
    assert [set(piece) for piece in answer.pieces] == [{"text_output", "output_ids"}]


@pytest.mark.parametrize(("exclude", "echoed"), [(None, TEXT), (False, TEXT), (True, "")])
def test_the_input_comes_back_unless_excluded(
    server: Serving, oracle: Oracle, exclude: bool | None, echoed: str
) -> None:
    inputs = {"text_input": TEXT, "max_tokens": 20, "sampling_parameters": {"ignore_eos": True}}
    options = {} if exclude is None else {"exclude_input_in_output": exclude}
    answer = server.ask({**inputs, **options})
    sampling = {"max_tokens": 20, "ignore_eos": True}
    expected = oracle.answer(Prompt(text_input=TEXT), sampling)
    assert answer.text == echoed + expected.text
    assert answer.ids == expected.ids


def test_a_stream_never_holds_the_input(server: Serving) -> None:
    sampling = {"ignore_eos": True, "max_tokens": 20}
    inputs = {"text_input": TEXT, "stream": True, "sampling_parameters": sampling}
    plain = server.ask(inputs)
    assert plain.text == server.ask({**inputs, "exclude_input_in_output": True}).text
    assert TEXT not in plain.text
    refused = server.ask({**inputs, "exclude_input_in_output": False})
    assert refused.error == (
        "[INVALID_ARG] exclude_input_in_output is false, must be true when stream is true"
    )


def cut_short(oracle: Oracle, max_tokens: int) -> tuple[str, str]:
    """The answer to CHAT that ends for its length, and why it ended."""
    answer = oracle.answer(Prompt(messages=CHAT), {"max_tokens": max_tokens})
    assert len(answer.ids) == max_tokens
    assert answer.finish_reason is not None
    return answer.text, answer.finish_reason.value


def test_max_tokens_and_min_length_inputs(server: Serving, oracle: Oracle) -> None:
    answer = server.ask({"messages": CHAT, "max_tokens": 5, **EVERYTHING})
    assert (answer.text, answer.finish_reason) == cut_short(oracle, 5)
    answer = server.ask({"messages": CHAT, "max_tokens": 60, "min_length": 60, **EVERYTHING})
    assert (len(answer.ids), answer.finish_reason) == (60, "length")


@pytest.mark.parametrize(
    "parameters",
    [
        {"max_tokens": 7},
        {"max_tokens": "7", "temperature": "0", "ignore_eos": "false", "top_p": "1.0"},
        {"max_tokens": "7", "ignore_eos": True, "unmasking": "threshold"},
    ],
)
def test_request_parameters(server: Serving, oracle: Oracle, parameters: dict[str, Any]) -> None:
    answer = server.ask({"messages": CHAT}, parameters)
    assert (answer.error, answer.text) == (None, cut_short(oracle, 7)[0])


def test_strings_in_the_json(server: Serving, oracle: Oracle) -> None:
    sampling = {"max_tokens": "12", "min_tokens": "12", "temperature": "0", "ignore_eos": "true"}
    answer = server.ask({"messages": CHAT, "sampling_parameters": sampling, **EVERYTHING})
    assert (answer.text, answer.finish_reason) == cut_short(oracle, 12)


def test_the_json_wins_over_inputs_and_those_over_parameters(
    server: Serving, oracle: Oracle
) -> None:
    inputs = {"messages": CHAT, "max_tokens": 9}
    json_too = {**inputs, "sampling_parameters": {"max_tokens": 4}}
    assert server.ask(json_too, {"max_tokens": 20}).text == cut_short(oracle, 4)[0]
    assert server.ask(inputs, {"max_tokens": 20}).text == cut_short(oracle, 9)[0]


@pytest.mark.parametrize("stream", [True, False])
def test_stop_strings(server: Serving, stream: bool) -> None:
    sampling = {"stop": ["nowhere", "0+1", "=4. The"]}
    inputs = {"messages": CHAT, "stream": stream, "sampling_parameters": sampling, **EVERYTHING}
    answer = server.ask(inputs)
    assert (answer.text, answer.finish_reason) == (SUM[: SUM.index("0+1")], "stop")
    assert sum(piece["num_output_tokens"] for piece in answer.pieces) == len(answer.ids)


def test_a_stop_string_as_a_request_parameter(server: Serving) -> None:
    assert server.ask({"messages": CHAT}, {"stop": "0+1"}).text == SUM[: SUM.index("0+1")]


def test_ignore_eos(server: Serving) -> None:
    sampling = {"ignore_eos": True, "max_tokens": 90}
    answer = server.ask({"messages": CHAT, "sampling_parameters": sampling, **EVERYTHING})
    assert (len(answer.ids), answer.finish_reason) == (90, "length")
    assert answer.text.startswith(SUM)


def test_seeds(server: Serving, oracle: Oracle) -> None:
    def ask(seed: int) -> list[int]:
        sampling = {**NOISE, "seed": seed}
        return server.ask({"messages": MANY_ANSWERS, "sampling_parameters": sampling}).ids

    first = ask(1)
    expected = oracle.answer(Prompt(messages=MANY_ANSWERS), {**NOISE, "seed": 1})
    assert first == ask(1) == expected.ids
    assert first != ask(2)


@pytest.mark.parametrize(
    "rule",
    [
        {"unmasking": "threshold", "confidence_threshold": 0.5},
        {"unmasking": "factor", "factor": 2.0},
        {"unmasking": "quota", "tokens_per_step": 3},
        {"unmasking": "steps", "steps": 20},
        {"unmasking": "random"},
        {"unmasking": "threshold", "confidence": "margin"},
        {"unmasking": "quota", "tokens_per_step": 4, "confidence": "entropy"},
        {"unmasking": "quota", "tokens_per_step": 4, "confidence": "random"},
        {"unmasking": "threshold", "top_k": 5, "top_p": 0.8, "block_length": 16},
    ],
)
def test_every_rule(server: Serving, oracle: Oracle, rule: dict[str, Any]) -> None:
    sampling = {**NOISE, **rule, "seed": 11}
    inputs = {"messages": MANY_ANSWERS, "stream": True, "sampling_parameters": sampling}
    answer = server.ask(inputs)
    assert answer.error is None
    assert answer.ids == oracle.answer(Prompt(messages=MANY_ANSWERS), sampling).ids


def test_generate_over_http(server: Serving) -> None:
    body = {"text_input": TEXT, "max_tokens": 8, "return_finish_reason": True, "id": "a"}
    status, answer = server.generate({**body, "parameters": {"ignore_eos": True}})
    assert status == 200
    assert '"finish_reason":"length"' in answer
    assert f'"text_output":"{TEXT}' in answer


def test_strings_over_http(server: Serving) -> None:
    strings = {"min_tokens": "6", "temperature": "0", "ignore_eos": "false"}
    status, answer = server.generate({"text_input": TEXT, "max_tokens": 6, **strings})
    assert (status, answer.count(TEXT)) == (200, 1)


def test_generate_stream_over_http(server: Serving) -> None:
    body = {"messages": '[{"role": "user", "content": "Add 4363 and 75."}]', "stream": True}
    status, events = server.http("/v2/models/sangam/generate_stream", body)
    assert status == 200
    assert events.count("data: {") == events.count("text_output") >= 2
