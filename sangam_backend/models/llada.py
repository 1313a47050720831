"""LLaDA (GSAI-ML/LLaDA-8B, LLaDA-1.5 and fine-tunes): multi-head or grouped-query attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sangam_backend.config import ModelConfig
from sangam_backend.models.checkpoint import Fields, TensorNames, check_heads

NAMES = TensorNames(
    embedding="model.transformer.wte.weight",
    attention_norm="model.transformer.blocks.{i}.attn_norm.weight",
    q="model.transformer.blocks.{i}.q_proj.weight",
    k="model.transformer.blocks.{i}.k_proj.weight",
    v="model.transformer.blocks.{i}.v_proj.weight",
    output="model.transformer.blocks.{i}.attn_out.weight",
    mlp_norm="model.transformer.blocks.{i}.ff_norm.weight",
    gate="model.transformer.blocks.{i}.ff_proj.weight",
    up="model.transformer.blocks.{i}.up_proj.weight",
    down="model.transformer.blocks.{i}.ff_out.weight",
    final_norm="model.transformer.ln_f.weight",
    head="model.transformer.ff_out.weight",
)

SERVED = {
    "activation_type": "silu",
    "alibi": False,
    "attention_layer_norm": False,
    "block_type": "llama",
    "include_bias": False,
    "bias_for_layer_norm": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "rope": True,
    "scale_logits": False,
    "weight_tying": False,
}


def parse(values: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(values)
    fields.must_be(SERVED)
    heads = fields.count("n_heads")
    if values.get("n_kv_heads") is not None:
        kv_heads = fields.count("n_kv_heads")
    else:
        kv_heads = 1 if values.get("multi_query_attention") else heads
    padded_vocab = values.get("embedding_size") is not None
    vocab_size = fields.count("embedding_size" if padded_vocab else "vocab_size")
    return check_heads(
        ModelConfig(
            family="llada",
            hidden_size=fields.count("d_model"),
            intermediate_size=fields.count("mlp_hidden_size"),
            num_layers=fields.count("n_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            vocab_size=vocab_size,
            rope_theta=fields.number("rope_theta"),
            rope_in_float32=bool(values.get("rope_full_precision", True)),
            rms_norm_eps=fields.number("rms_norm_eps"),
            qkv_bias=bool(values.get("include_qkv_bias", False)),
            logit_shift=0,
            max_sequence_length=fields.count("max_sequence_length"),
            mask_token_id=fields.token("mask_token_id", vocab_size),
            stop_token_ids=frozenset(),
        )
    )
