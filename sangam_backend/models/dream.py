"""Dream (Dream-org/Dream-v0-7B and fine-tunes): the Qwen2 layout, logits shifted by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sangam_backend.config import ModelConfig
from sangam_backend.models.checkpoint import Fields, TensorNames, check_heads

NAMES = TensorNames(
    embedding="model.embed_tokens.weight",
    attention_norm="model.layers.{i}.input_layernorm.weight",
    q="model.layers.{i}.self_attn.q_proj.weight",
    k="model.layers.{i}.self_attn.k_proj.weight",
    v="model.layers.{i}.self_attn.v_proj.weight",
    output="model.layers.{i}.self_attn.o_proj.weight",
    mlp_norm="model.layers.{i}.post_attention_layernorm.weight",
    gate="model.layers.{i}.mlp.gate_proj.weight",
    up="model.layers.{i}.mlp.up_proj.weight",
    down="model.layers.{i}.mlp.down_proj.weight",
    final_norm="model.norm.weight",
    head="lm_head.weight",
)

SERVED = {
    "hidden_act": "silu",
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}


def parse(values: Mapping[str, Any]) -> ModelConfig:
    fields = Fields(values)
    fields.must_be(SERVED)
    vocab_size = fields.count("vocab_size")
    return check_heads(
        ModelConfig(
            family="dream",
            hidden_size=fields.count("hidden_size"),
            intermediate_size=fields.count("intermediate_size"),
            num_layers=fields.count("num_hidden_layers"),
            num_heads=fields.count("num_attention_heads"),
            num_kv_heads=fields.count("num_key_value_heads"),
            vocab_size=vocab_size,
            rope_theta=fields.number("rope_theta"),
            rope_in_float32=False,
            rms_norm_eps=fields.number("rms_norm_eps"),
            qkv_bias=True,
            logit_shift=1,
            max_sequence_length=fields.count("max_position_embeddings"),
            mask_token_id=fields.token("mask_token_id", vocab_size),
            stop_token_ids=frozenset(),
        )
    )
