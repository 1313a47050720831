"""Make the two small checkpoints beside this script: `python checkpoints/make_tiny.py`.

tiny-llada keeps its trained weights and gets its tokenizer files; tiny-dream is made whole.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

HERE = Path(__file__).parent
SEED = 0
BYTES = 256
EMBEDDING_ROWS = 320
CONTEXT = 2048

LLADA_SPECIALS = [
    "<|startoftext|>",
    "<|endoftext|>",
    "<|mdm_mask|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
]
LLADA_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first %}{{ bos_token }}{% endif %}"
    r"{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
    "{{ message['content'] | trim }}{{ '<|eot_id|>' }}"
    "{% endfor %}"
    r"{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)

DREAM_SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|beginoftext|>", "<|mask|>"]
DREAM_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}"
    r"{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
    "{% endif %}"
    "{% for message in messages %}"
    r"{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def byte_characters() -> list[str]:
    """The printable stand-in of each byte that byte-level BPE vocabularies use."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(BYTES, 2 * BYTES))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(BYTES)]


def byte_vocabulary() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(byte_characters())}


def special_ids(specials: list[str]) -> dict[str, int]:
    return {content: BYTES + index for index, content in enumerate(specials)}


def added_tokens_decoder(specials: list[str]) -> dict[str, dict[str, Any]]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        str(token): {"content": content, **flags, "special": True}
        for content, token in special_ids(specials).items()
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_llada_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab=byte_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(content, normalized=False, special=True) for content in LLADA_SPECIALS]
    )
    tokenizer.save(str(directory / "tokenizer.json"))

    named = {"bos_token": LLADA_SPECIALS[0], "eos_token": LLADA_SPECIALS[1]}
    named["pad_token"] = named["eos_token"]
    write_json(directory / "special_tokens_map.json", named)
    write_json(
        directory / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "add_eos_token": False,
            "added_tokens_decoder": added_tokens_decoder(LLADA_SPECIALS),
            **named,
            "chat_template": LLADA_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )


def make_llada(directory: Path) -> None:
    write_llada_tokenizer(directory)
    ids = special_ids(LLADA_SPECIALS)
    write_json(
        directory / "generation_config.json",
        {"bos_token_id": ids["<|startoftext|>"], "eos_token_id": ids["<|endoftext|>"]},
    )


def write_dream_tokenizer(directory: Path) -> None:
    write_json(directory / "vocab.json", byte_vocabulary())
    (directory / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")
    write_json(directory / "added_tokens.json", special_ids(DREAM_SPECIALS))

    named = {
        "bos_token": "<|beginoftext|>",
        "eos_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "pad_token": "<|endoftext|>",
    }
    write_json(directory / "special_tokens_map.json", named)
    write_json(
        directory / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "add_prefix_space": False,
            "added_tokens_decoder": added_tokens_decoder(DREAM_SPECIALS),
            "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
            **named,
            "chat_template": DREAM_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "errors": "replace",
            "model_max_length": CONTEXT,
            "split_special_tokens": False,
            "tokenizer_class": "DreamTokenizer",
            "unk_token": None,
        },
    )


def dream_config() -> dict[str, Any]:
    ids = special_ids(DREAM_SPECIALS)
    return {
        "architectures": ["DreamModel"],
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_dream.DreamConfig",
            "AutoModel": "modeling_dream.DreamModel",
        },
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|endoftext|>"],
        "hidden_act": "silu",
        "hidden_size": 256,
        "initializer_range": 0.02,
        "intermediate_size": 384,
        "mask_token_id": ids["<|mask|>"],
        "max_position_embeddings": CONTEXT,
        "max_window_layers": 3,
        "model_type": "Dream",
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "pad_token_id": ids["<|endoftext|>"],
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": EMBEDDING_ROWS,
    }


def dream_generation_config() -> dict[str, Any]:
    ids = special_ids(DREAM_SPECIALS)
    return {
        "alg": "origin",
        "alg_temp": None,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|endoftext|>"],
        "eps": 0.001,
        "mask_token_id": None,
        "pad_token_id": ids["<|endoftext|>"],
        "steps": 512,
        "temperature": 0.0,
        "top_k": None,
        "top_p": None,
    }


class Normals:
    """Seeded normal tensors; the scales give sharp, position-dependent attention."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, gain: float) -> torch.Tensor:
        return self._draw(rows, columns) * gain / math.sqrt(columns)

    def embedding(self, rows: int, columns: int) -> torch.Tensor:
        return self._draw(rows, columns)

    def norm(self, size: int) -> torch.Tensor:
        return 1 + 0.1 * self._draw(size)

    def bias(self, size: int) -> torch.Tensor:
        return 0.2 * self._draw(size)

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator)


def dream_layer(normals: Normals, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    return {
        "input_layernorm.weight": normals.norm(hidden),
        "self_attn.q_proj.weight": normals.matrix(hidden, hidden, 2.5),
        "self_attn.q_proj.bias": normals.bias(hidden),
        "self_attn.k_proj.weight": normals.matrix(kv, hidden, 2.5),
        "self_attn.k_proj.bias": normals.bias(kv),
        "self_attn.v_proj.weight": normals.matrix(kv, hidden, 1.5),
        "self_attn.v_proj.bias": normals.bias(kv),
        "self_attn.o_proj.weight": normals.matrix(hidden, hidden, 1.5),
        "post_attention_layernorm.weight": normals.norm(hidden),
        "mlp.gate_proj.weight": normals.matrix(inner, hidden, 1.5),
        "mlp.up_proj.weight": normals.matrix(inner, hidden, 1.5),
        "mlp.down_proj.weight": normals.matrix(hidden, inner, 1.5),
    }


def dream_shards(config: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    normals = Normals(SEED)
    rows, hidden = config["vocab_size"], config["hidden_size"]
    first = {"model.embed_tokens.weight": normals.embedding(rows, hidden)}
    second: dict[str, torch.Tensor] = {}
    for index in range(config["num_hidden_layers"]):
        shard = first if index < config["num_hidden_layers"] // 2 else second
        for name, tensor in dream_layer(normals, config).items():
            shard[f"model.layers.{index}.{name}"] = tensor
    second["model.norm.weight"] = normals.norm(hidden)
    head = normals.matrix(rows, hidden, 6.0)
    head[config["mask_token_id"]] = 0.0
    second["lm_head.weight"] = head
    shards = [first, second]
    return [{name: tensor.bfloat16() for name, tensor in s.items()} for s in shards]


def write_shards(directory: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        (directory / name).write_bytes(save(shard, metadata={"format": "pt"}))
        places |= dict.fromkeys(shard, name)
    total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
    write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))},
    )


def make_dream(directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    config = dream_config()
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", dream_generation_config())
    write_dream_tokenizer(directory)
    write_shards(directory, dream_shards(config))


if __name__ == "__main__":
    make_llada(HERE / "tiny-llada")
    make_dream(HERE / "tiny-dream")
