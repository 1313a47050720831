"""The engine equals the reference token for token, alone or in any batch, on CPU in float32."""

from __future__ import annotations

import random
from importlib.util import find_spec
from typing import Any, get_args

import goldens
import pytest
import torch

from sangam_backend.config import Cache, ConfigError, EngineConfig
from sangam_backend.engine import Engine
from sangam_backend.frontend import open_frontend
from sangam_backend.models.transformer import Transformer
from sangam_backend.prompt import Prompt
from sangam_backend.reference import Predictor, ServingSampler, generate
from sangam_backend.request import ErrorCode, FinishReason, Output, Request, RequestError
from sangam_backend.runner import new_workspace

Job = tuple[list[int], dict[str, Any]]
Answer = tuple[list[int], FinishReason | None, int]


def open_engine(name: str, **settings: Any) -> Engine:
    return Engine(EngineConfig(model=str(goldens.GOLDEN / name), **settings))


def new_request(engine: Engine, job: Job, stream: bool = False) -> Request:
    prompt, sampling = job
    return engine.frontend.new_request("", Prompt(input_ids=prompt), sampling, stream)


def random_job(rng: random.Random) -> Job:
    prompt = [rng.randrange(480) for _ in range(rng.randint(1, 60))]
    sampling: dict[str, Any] = {
        "max_tokens": rng.randint(1, 50),
        "block_length": rng.choice([1, 4, 8, 16, 32]),
        "unmasking": rng.choice(["threshold", "factor", "quota", "random", "steps"]),
        "confidence": rng.choice(["probability", "margin", "entropy", "random"]),
        "confidence_threshold": rng.choice([0.3, 0.6, 0.9]),
        "tokens_per_step": rng.randint(1, 5),
        "temperature": rng.choice([0, 0, 0.5, 1.5]),
        "top_p": rng.choice([1, 0.8]),
        "top_k": rng.choice([0, 10]),
        "seed": rng.randrange(2**63),
        "ignore_eos": rng.random() < 0.5,
    }
    if rng.random() < 0.3:
        sampling["min_tokens"] = rng.randint(0, sampling["max_tokens"])
    return prompt, sampling


def run_reference(model: Transformer, engine: Engine, job: Job) -> Answer:
    request = new_request(engine, job)
    cache = engine.config.cache
    sampler = ServingSampler(request, model.config, cached=cache != "none")
    (output,) = generate(request, Predictor(model, request.sequence_length), sampler, cache)
    return output.ids, output.finish_reason, request.num_forwards


def drain(engine: Engine) -> dict[Request, list[Output]]:
    outputs: dict[Request, list[Output]] = {}
    while not engine.is_idle:
        for request, output in engine.step():
            outputs.setdefault(request, []).append(output)
    return outputs


@pytest.mark.parametrize("cache", get_args(Cache))
@pytest.mark.parametrize("name", goldens.MODELS)
def test_random_requests_in_any_batch_and_order(name: str, cache: Cache) -> None:
    rng = random.Random(name)
    jobs = [random_job(rng) for _ in range(24)]
    engine = open_engine(
        name,
        cache=cache,
        max_batch_size=7,
        max_tokens_per_iteration=200,
        kv_cache_tokens=600,
    )
    model = engine.runner.model
    expected = [run_reference(model, engine, job) for job in jobs]
    for _ in range(2):
        order = list(range(len(jobs)))
        rng.shuffle(order)
        requests = {}
        answers: dict[int, Answer] = {}
        while len(answers) < len(jobs):
            for _ in range(rng.choice([0, 0, 1, 4])):
                if order:
                    index = order.pop()
                    request = new_request(engine, jobs[index])
                    requests[request] = index
                    engine.submit(request)
            for request, output in engine.step():
                answers[requests[request]] = (
                    output.ids,
                    output.finish_reason,
                    request.num_forwards,
                )
            engine.pages.check()
        assert [answers[i] for i in range(len(jobs))] == expected
        assert engine.pages.num_used == 0


@pytest.mark.parametrize("name", goldens.MODELS)
def test_golden_cases_of_the_dual_cache(name: str) -> None:
    engine = open_engine(name)
    expected = {}
    for case in goldens.read_cases(name):
        sampling = goldens.serving_sampling(case)
        single = len(case["prompt_ids"]) == 1 and case["id"] not in goldens.MENDED
        if sampling is not None and goldens.cache(case) == "dual" and single:
            request = new_request(engine, (case["prompt_ids"][0], sampling))
            engine.submit(request)
            expected[request] = case
    assert expected
    for request, (output,) in drain(engine).items():
        case = expected.pop(request)
        assert output.ids == case["generated_ids"][0]
        assert request.num_forwards == case["nfe"]
    assert not expected


def test_streamed_pieces_join_to_the_whole() -> None:
    engine = open_engine("llada_gqa_tiny")
    rng = random.Random(1)
    for job in [random_job(rng) for _ in range(6)]:
        expected = run_reference(engine.runner.model, engine, job)
        engine.submit(new_request(engine, job, stream=True))
        ((request, outputs),) = drain(engine).items()
        assert [i for output in outputs for i in output.ids] == expected[0]
        assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        assert outputs[-1].finish_reason is expected[1]
        assert request.num_output_tokens == len(expected[0])


def test_eos_ends_early_and_ignore_eos_does_not() -> None:
    engine = open_engine("llada_gqa_tiny")
    case = next(c for c in goldens.read_cases("llada_gqa_tiny") if c["id"] == "G04")
    sampling = goldens.serving_sampling(case)
    assert sampling is not None
    early = sampling | {"ignore_eos": False}
    requests = [new_request(engine, (case["prompt_ids"][0], s)) for s in (sampling, early)]
    for request in requests:
        engine.submit(request)
    outputs = drain(engine)
    whole, short = (outputs[request][0] for request in requests)
    eos = case["first_eos"][0]
    assert whole.ids == case["generated_ids"][0]
    assert short.ids == whole.ids[:eos]
    assert (whole.finish_reason, short.finish_reason) == (FinishReason.LENGTH, FinishReason.STOP)
    assert requests[1].num_forwards < requests[0].num_forwards


def test_cancel_frees_before_the_next_iteration() -> None:
    engine = open_engine("llada_tiny", max_batch_size=2)
    requests = [new_request(engine, ([1, 2, 3], {"max_tokens": 64})) for _ in range(3)]
    for request in requests:
        engine.submit(request)
    engine.step()
    used = engine.pages.num_used
    engine.cancel(requests[0])
    engine.cancel(requests[2])
    cancelled = [emission for emission in engine.step() if emission.output.finish_reason]
    assert {request for request, _ in cancelled} == {requests[0], requests[2]}
    assert engine.pages.num_used == used // 2
    engine.cancel(requests[0])
    outputs = drain(engine)
    engine.cancel(requests[1])
    assert engine.step() == []
    assert list(outputs) == [requests[1]]
    assert engine.pages.num_used == 0


def test_a_mask_id_in_the_prompt_is_an_ordinary_token() -> None:
    engine = open_engine("llada_tiny")
    job: Job = ([5, 500, 7, 500], {"max_tokens": 20, "block_length": 8, "ignore_eos": True})
    expected = run_reference(engine.runner.model, engine, job)
    request = new_request(engine, job)
    engine.submit(request)
    ((_, (output,)),) = drain(engine).items()
    assert output.ids == expected[0]
    assert 500 not in output.ids
    assert engine.runner.state.tokens[0, :4].tolist() == job[0]


@pytest.mark.parametrize("rule", ["threshold", "factor", "quota", "random", "steps"])
def test_a_model_that_predicts_only_masks_still_answers(rule: str) -> None:
    engine = open_engine("llada_tiny")
    engine.runner.model.head[500] = 0
    engine.runner.model.head[:500] *= 1e-3
    request = new_request(engine, ([1, 2], {"max_tokens": 16, "unmasking": rule}))
    engine.submit(request)
    ((_, (output,)),) = drain(engine).items()
    assert 500 not in output.ids


def test_a_pool_smaller_than_the_model_limits_requests() -> None:
    engine = open_engine("llada_tiny", kv_cache_tokens=64)
    with pytest.raises(RequestError, match="exceed the limit of 64 tokens"):
        new_request(engine, ([1] * 40, {"max_tokens": 32}))
    with pytest.raises(ConfigError, match="KV pool would hold 16 tokens"):
        open_engine("llada_tiny", kv_cache_tokens=16)


def test_checkpoint_without_tokenizer_takes_ids_alone() -> None:
    engine = open_engine("llada_tiny")
    assert engine.frontend.tokenizer is None
    with pytest.raises(RequestError, match="has no tokenizer"):
        engine.frontend.new_request("", Prompt(text_input="hello"), {}, False)
    with pytest.raises(RequestError, match="stop needs a tokenizer"):
        new_request(engine, ([1], {"stop": ["x"]}))


def test_open_frontend_limits() -> None:
    engine = open_engine("dream_tiny", max_sequence_length=100)
    config = EngineConfig(model=str(goldens.GOLDEN / "dream_tiny"))
    frontend = open_frontend(engine.runner.model, config, pool_tokens=80)
    assert frontend.limits.max_sequence_length == 80
    assert engine.frontend.limits.max_sequence_length == 100
    with pytest.raises(ConfigError, match="limited to 2048"):
        open_engine("dream_tiny", max_sequence_length=4096)


@pytest.mark.skipif(find_spec("flashinfer") is not None, reason="FlashInfer is installed")
def test_cuda_without_flashinfer_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"needs FlashInfer: pip install 'sangam\[cuda\]'"):
        new_workspace(EngineConfig(model=""), torch.device("cuda"))


def test_more_waiting_tokens_than_allowed_are_refused() -> None:
    """One that is too long by itself still runs when nothing else waits."""
    engine = open_engine("llada_tiny", max_queue_tokens=100)
    job = [1, 2, 3], {"max_tokens": 61}
    requests = [new_request(engine, job) for _ in range(4)]
    for request in requests:
        engine.submit(request)
    outputs = drain(engine)
    reasons = [request.finish_reason is FinishReason.ERROR for request in requests]
    assert reasons == [False, True, True, True]
    error = outputs[requests[1]][-1].error
    assert error is not None
    assert error.code is ErrorCode.UNAVAILABLE
    assert str(error) == "67 tokens wait, 67 more exceed the limit of 100 (max_queue_tokens)"
    assert (engine.pages.num_used, engine.scheduler.waiting_tokens) == (0, 0)
    again = new_request(engine, job)
    engine.submit(again)
    drain(engine)
    assert again.finish_reason is not FinishReason.ERROR
