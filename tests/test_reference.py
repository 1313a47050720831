"""The reference against the published samplers, on CPU in float32."""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

import goldens
import pytest
import torch
from torch import Tensor

from sangam_backend.config import Cache
from sangam_backend.frontend import Frontend
from sangam_backend.models.transformer import Transformer
from sangam_backend.reference import Predictor, Sampler, ServingSampler, View, generate
from sangam_backend.reference.upstream import DreamSampler, GuidedPredictor, LLaDASampler
from sangam_backend.request import Request, RequestError

LOADED = {model: goldens.load(model) for model in goldens.MODELS}
CASES = [(model, case) for model in goldens.MODELS for case in goldens.read_cases(model)]


def upstream_sampling(case: dict[str, Any]) -> dict[str, Any]:
    """Canvas and blocks; the upstream sampler brings its own rule."""
    params = case["params"]
    length = params.get("gen_length") or params["max_new_tokens"]
    block_length = params.get("block_length", length)
    return {"max_tokens": length, "block_length": block_length, "ignore_eos": True}


def upstream_sampler(case: dict[str, Any], request: Request, eos: int) -> Sampler:
    params = case["params"]
    if "gen_length" in params:
        random_dtype = torch.float64 if case["ref"] == "fastdllm-2026-05" else torch.float32
        drawn_twice = params.get("cache") == "prefix" and params["temperature"] > 0
        return LLaDASampler(
            temperature=params["temperature"],
            steps_per_block=params["steps"] // request.params.num_blocks,
            random_remasking=random_dtype if params["remasking"] == "random" else None,
            unranked_ids=(eos, goldens.EOT) if params.get("confidence_eos_eot_inf") else (),
            draws=2 if drawn_twice else 1,
        )
    algorithm = params["alg"]
    return DreamSampler(
        temperature=params["temperature"],
        top_p=params["top_p"] or 1.0,
        top_k=params["top_k"] or 0,
        algorithm="capped_threshold" if algorithm == "confidence_threshold" else algorithm,
        steps=params["steps"] // request.params.num_blocks,
        eps=params.get("eps", 1e-3),
        alg_temp=params.get("alg_temp") or 0.0,
        threshold=params.get("threshold", 0.0),
        cached="dual_cache" in params,
    )


class CountingSampler:
    """Counts the forwards of each block."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.forwards: Counter[int] = Counter()

    def choose(self, view: View) -> tuple[Tensor, Tensor]:
        self.forwards[view.block] += 1
        return self.sampler.choose(view)


def run(
    model: Transformer, frontend: Frontend, case: dict[str, Any]
) -> tuple[list[list[int]], int]:
    """Output ids of each row, and the forwards of a batch whose rows wait for each other."""
    cache = cast(Cache, goldens.cache(case))
    sampling = goldens.serving_sampling(case)
    outputs = []
    forwards: Counter[int] = Counter()
    for prompt in goldens.prompts(case):
        request = frontend.new_request("", prompt, sampling or upstream_sampling(case), False)
        length = request.sequence_length
        predictor = Predictor(model, length)
        sampler: Sampler = ServingSampler(request, model.config, cached=cache != "none")
        if sampling is None:
            (eos,) = model.config.stop_token_ids
            sampler = upstream_sampler(case, request, eos)
        if scale := case["params"].get("cfg_scale"):
            predictor = GuidedPredictor(model, length, len(request.prompt), scale)
        if case["seed"] is not None:
            torch.manual_seed(case["seed"])
        counting = CountingSampler(sampler)
        (output,) = generate(request, predictor, counting, cache)
        outputs.append(output.ids)
        forwards |= counting.forwards
    return outputs, forwards.total()


@pytest.mark.parametrize(("name", "case"), CASES, ids=[case["id"] for _, case in CASES])
def test_equals_published_sampler(name: str, case: dict[str, Any]) -> None:
    if case["id"] == "D39":
        with pytest.raises(RequestError, match="steps is 4, must be from 8"):
            run(*LOADED[name], case)
        return
    outputs, forwards = run(*LOADED[name], case)
    if case["id"] not in goldens.MENDED:
        assert outputs == case["generated_ids"]
        assert forwards == case["nfe"]
        return
    assert not any(500 in output for output in outputs)
    if twin := goldens.MENDED[case["id"]]:
        (mended,) = [other for _, other in CASES if other["id"] == twin]
        assert outputs == case["generated_ids"] == mended["generated_ids"]
        assert forwards == mended["nfe"] < case["nfe"]
    else:
        assert case["masks_left"] > 0
