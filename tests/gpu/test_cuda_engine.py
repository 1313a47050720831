"""The engine on CUDA: graphs and overlap against the plain loop, goldens, cancels, memory."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import goldens
import pytest
import torch
from tasks import TASKS, generate

from sangam_backend.config import EngineConfig
from sangam_backend.engine import Engine
from sangam_backend.prompt import Prompt
from sangam_backend.request import Request

CHECKPOINTS = Path(__file__).parent.parent.parent / "checkpoints"

Job = tuple[Prompt, dict[str, Any]]


def open_engine(model: Path, **settings: Any) -> Engine:
    return Engine(EngineConfig(model=str(model), device="cuda", **settings))


def new_request(engine: Engine, prompt: Prompt, sampling: dict[str, Any]) -> Request:
    return engine.frontend.new_request("", prompt, sampling, False)


def random_sampling(rng: random.Random) -> dict[str, Any]:
    return {
        "max_tokens": rng.choice([20, 40, 64, 96]),
        "unmasking": rng.choice(["threshold", "factor", "quota", "steps", "random"]),
        "confidence": rng.choice(["probability", "margin", "entropy", "random"]),
        "tokens_per_step": rng.randint(1, 5),
        "temperature": rng.choice([0, 0, 0.7]),
        "top_p": rng.choice([1, 0.9]),
        "top_k": rng.choice([0, 20]),
        "seed": rng.randrange(2**60),
        "ignore_eos": rng.random() < 0.5,
    }


def answers(engine: Engine, jobs: list[Job]) -> list[list[int]]:
    requests = [new_request(engine, *job) for job in jobs]
    for request in requests:
        engine.submit(request)
    outputs = {}
    while not engine.is_idle:
        for request, output in engine.step():
            outputs[request] = output.ids
    assert engine.pages.num_used == 0
    return [outputs[request] for request in requests]


def random_prompt(rng: random.Random) -> Prompt:
    return Prompt(input_ids=[rng.randrange(255) for _ in range(rng.randint(5, 300))])


def random_question(rng: random.Random) -> Prompt:
    text = generate(rng, rng.choice(list(TASKS))).prompt
    return Prompt(messages=[{"role": "user", "content": text}])


def random_jobs(seed: str, new_prompt: Callable[[random.Random], Prompt]) -> list[Job]:
    rng = random.Random(seed)
    return [(new_prompt(rng), random_sampling(rng)) for _ in range(24)]


# Up to 8 rows a graph has no padding, so that its products have the plain loop's shapes.
SMALL = {"max_batch_size": 8, "kv_cache_tokens": 8192, "tuned_products": False}


def test_graphs_and_overlap_equal_the_plain_loop() -> None:
    jobs = random_jobs("tiny-llada", random_question)
    plain = {"cuda_graphs": False, "overlap": False}
    expected = answers(open_engine(CHECKPOINTS / "tiny-llada", **SMALL, **plain), jobs)
    for levers in ({}, {"cuda_graphs": False}, {"overlap": False}):
        engine = open_engine(CHECKPOINTS / "tiny-llada", **SMALL, **levers)
        assert answers(engine, jobs) == expected
        assert bool(engine.runner.graphs) == levers.get("cuda_graphs", True)


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_overlap_equals_the_plain_loop_on_random_weights(cuda_graphs: bool) -> None:
    """Graphs are left alike: FlashInfer sums split K/V in another order in them, and random
    weights turn a last bit into another token."""
    jobs = random_jobs("tiny-dream", random_prompt)
    settings = SMALL | {"cuda_graphs": cuda_graphs}
    plain = open_engine(CHECKPOINTS / "tiny-dream", **settings, overlap=False)
    assert answers(open_engine(CHECKPOINTS / "tiny-dream", **settings), jobs) == answers(
        plain, jobs
    )


@pytest.mark.parametrize("name", goldens.MODELS)
def test_golden_cases_in_float32(name: str) -> None:
    """The published dual-cache outputs, token for token, in float32 through SDPA."""
    engine = open_engine(goldens.GOLDEN / name, dtype="float32", attention="sdpa")
    cases = [
        case
        for case in goldens.read_cases(name)
        if goldens.serving_sampling(case) is not None
        and goldens.cache(case) == "dual"
        and len(case["prompt_ids"]) == 1
        and case["id"] not in goldens.MENDED
    ]
    jobs = [
        (Prompt(input_ids=case["prompt_ids"][0]), goldens.serving_sampling(case) or {})
        for case in cases
    ]
    assert answers(engine, jobs) == [case["generated_ids"][0] for case in cases]


def test_tiny_llada_answers_in_bfloat16() -> None:
    engine = open_engine(CHECKPOINTS / "tiny-llada")
    messages = [{"role": "user", "content": "Add 4363 and 75."}]
    request = engine.frontend.new_request("", Prompt(messages=messages), {"max_tokens": 64}, False)
    engine.submit(request)
    texts = []
    while not engine.is_idle:
        texts += [output.text for _, output in engine.step()]
    assert texts[-1].endswith("The sum is 4438.")


def test_cancels_under_load_and_no_growth_over_2000_requests() -> None:
    engine = open_engine(CHECKPOINTS / "tiny-llada", kv_cache_tokens=16384)
    rng = random.Random(0)
    memory = []
    for _ in range(4):
        requests = []
        for _ in range(500):
            requests.append(new_request(engine, random_question(rng), random_sampling(rng)))
            engine.submit(requests[-1])
        ended = 0
        while not engine.is_idle:
            if rng.random() < 0.3:
                engine.cancel(rng.choice(requests))
            ended += sum(output.finish_reason is not None for _, output in engine.step())
            engine.pages.check()
        assert ended == 500
        assert engine.pages.num_used == 0
        gc.collect()
        memory.append(torch.cuda.memory_reserved())
    assert memory[-1] == memory[1]
