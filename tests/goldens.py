"""The golden cases: outputs of the published samplers (see golden/README.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from sangam_backend.config import EngineConfig
from sangam_backend.frontend import Frontend, open_frontend
from sangam_backend.models import load_model
from sangam_backend.models.transformer import Transformer
from sangam_backend.prompt import Prompt

GOLDEN = Path(__file__).parent / "golden"
MODELS = ("llada_tiny", "llada_gqa_tiny", "dream_tiny")
EOT = 502
# Published faults that the loop does not repeat: a forward after a block is full, a cap on the
# forwards of a block, a block of one step.
MENDED = {"L27": "L53", "L28": "L54", "L50": None, "L51": None, "D39": None}


def read_cases(model: str) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = json.loads((GOLDEN / model / "cases.json").read_text())["cases"]
    assert all(case["robust"] for case in cases)
    return cases


def load(model: str) -> tuple[Transformer, Frontend]:
    config = EngineConfig(model=str(GOLDEN / model))
    transformer = load_model(config, torch.float32, torch.device("cpu"))
    return transformer, open_frontend(transformer, config, pool_tokens=1 << 20)


def prompts(case: dict[str, Any]) -> list[Prompt]:
    """The rows of a case, without the padding on their left."""
    rows = case["prompt_ids"]
    masks = case.get("attention_mask") or [[1] * len(row) for row in rows]
    return [
        Prompt(input_ids=[token for token, real in zip(row, mask) if real])
        for row, mask in zip(rows, masks)
    ]


def serving_sampling(case: dict[str, Any]) -> dict[str, Any] | None:
    """The case as sampling parameters, or None where no served rule expresses it."""
    params = case["params"]
    algorithm = params.get("alg")
    if case["seed"] is not None or "cfg_scale" in params or "eps" in params:
        return None
    if params.get("confidence_eos_eot_inf") or case["ref"] == "fastdllm-dream-noblock":
        return None
    length = params.get("gen_length") or params["max_new_tokens"]
    sampling: dict[str, Any] = {
        "max_tokens": length,
        "block_length": params.get("block_length", length),
        "ignore_eos": True,
    }
    if params.get("logits_eos_inf"):
        sampling["min_tokens"] = length
    if "factor" in params:
        return sampling | {"unmasking": "factor", "factor": params["factor"]}
    if "threshold" in params:
        return sampling | {"confidence_threshold": params["threshold"]}
    measures = {"maskgit_plus": "probability", "topk_margin": "margin", "entropy": "entropy"}
    if algorithm:
        sampling["confidence"] = measures[algorithm]
    return sampling | {"unmasking": "steps", "steps": params["steps"]}


def cache(case: dict[str, Any]) -> str:
    params = case["params"]
    if "dual_cache" in params:
        return "dual" if params["dual_cache"] else "prefix"
    return str(params.get("cache", "none"))
