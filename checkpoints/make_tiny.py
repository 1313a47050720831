"""Write all of the two small checkpoints but the weights, which train.py makes."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from tasks import NAMES, TASKS, generate
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
CONTEXT = 2048
HEAD_DIM = 64
BYTES = 256
TEXT_TOKENS = 824
EMBEDDING_ROWS = 832

# How Qwen2 splits text before merging: digits stand alone, a word takes the space before it.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Family:
    """What tells the two models apart."""

    specials: tuple[str, ...]
    mask: str
    turn_end: str
    chat_template: str
    layers: int
    heads: int
    kv_heads: int
    inner: int
    norm_eps: float
    qkv_bias: bool
    logit_shift: int
    """The logits at a position are those of the token this far ahead."""
    rope_theta: float = 10000.0

    @property
    def hidden(self) -> int:
        return self.heads * HEAD_DIM

    def token_id(self, special: str) -> int:
        return TEXT_TOKENS + self.specials.index(special)

    @property
    def mask_id(self) -> int:
        return self.token_id(self.mask)

    @property
    def turn_end_id(self) -> int:
        return self.token_id(self.turn_end)

    @property
    def eos_id(self) -> int:
        return self.token_id("<|endoftext|>")


LLADA = Family(
    specials=(
        "<|startoftext|>",
        "<|endoftext|>",
        "<|mdm_mask|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ),
    mask="<|mdm_mask|>",
    turn_end="<|eot_id|>",
    chat_template=(
        "{% for message in messages %}"
        "{% if loop.first %}{{ bos_token }}{% endif %}"
        r"{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
        "{{ message['content'] | trim }}{{ '<|eot_id|>' }}"
        "{% endfor %}"
        r"{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
    ),
    layers=7,
    heads=4,
    kv_heads=4,
    inner=320,
    norm_eps=1e-5,
    qkv_bias=False,
    logit_shift=0,
)
DREAM = Family(
    specials=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|beginoftext|>", "<|mask|>"),
    mask="<|mask|>",
    turn_end="<|im_end|>",
    chat_template=(
        "{% if messages[0]['role'] != 'system' %}"
        r"{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}"
        "{% endif %}"
        "{% for message in messages %}"
        r"{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
        "{% endfor %}"
        r"{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    layers=7,
    heads=4,
    kv_heads=2,
    inner=384,
    norm_eps=1e-6,
    qkv_bias=True,
    logit_shift=1,
)
FAMILIES = {"llada": LLADA, "dream": DREAM}


@cache
def vocabulary() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Byte-level BPE trained on generated items: each token's id, and the merges.

    The first ids are the bytes themselves, then come the merges in order.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=TEXT_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    merges = [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    tokens = byte_characters() + [left + right for left, right in merges]
    return {token: index for index, token in enumerate(tokens)}, merges


def corpus() -> Iterator[str]:
    rng = Random(0)
    yield from ["You are a helpful assistant.", "system", "user", "assistant"] * 1000
    yield from NAMES * 300
    for task in TASKS:
        for _ in range(1500 if task == "count" else 500):
            item = generate(rng, task)
            yield from (item.prompt, item.answer)


def byte_characters() -> list[str]:
    """The printable stand-in of each byte that byte-level BPE vocabularies use."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = iter(range(BYTES, 2 * BYTES))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(BYTES)]


def pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def build_tokenizer(family: Family) -> Tokenizer:
    vocab, merges = vocabulary()
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(content, normalized=False, special=True) for content in family.specials]
    )
    return tokenizer


def write(family: str, directory: Path) -> None:
    """Writes all of a checkpoint but its weights."""
    directory.mkdir(parents=True, exist_ok=True)
    (write_llada if family == "llada" else write_dream)(directory)


def write_llada(directory: Path) -> None:
    named = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>"}
    named["pad_token"] = named["eos_token"]
    build_tokenizer(LLADA).save(str(directory / "tokenizer.json"))
    write_json(directory / "special_tokens_map.json", named)
    write_json(directory / "tokenizer_config.json", llada_tokenizer_config(named))
    write_json(directory / "config.json", llada_config())
    write_json(
        directory / "generation_config.json",
        {"bos_token_id": LLADA.token_id("<|startoftext|>"), "eos_token_id": LLADA.eos_id},
    )


def write_dream(directory: Path) -> None:
    vocab, merges = vocabulary()
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges)]
    named = {
        "bos_token": "<|beginoftext|>",
        "eos_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "pad_token": "<|endoftext|>",
    }
    write_json(directory / "vocab.json", vocab)
    (directory / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    write_json(
        directory / "added_tokens.json",
        {content: DREAM.token_id(content) for content in DREAM.specials},
    )
    write_json(directory / "special_tokens_map.json", named)
    write_json(directory / "tokenizer_config.json", dream_tokenizer_config(named))
    write_json(directory / "config.json", dream_config())
    write_json(directory / "generation_config.json", dream_generation_config())


def llada_tokenizer_config(named: dict[str, str]) -> dict[str, Any]:
    return {
        "add_bos_token": False,
        "add_eos_token": False,
        "added_tokens_decoder": added_tokens_decoder(LLADA),
        **named,
        "chat_template": LLADA.chat_template,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def dream_tokenizer_config(named: dict[str, str]) -> dict[str, Any]:
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": added_tokens_decoder(DREAM),
        "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        **named,
        "chat_template": DREAM.chat_template,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "model_max_length": CONTEXT,
        "split_special_tokens": False,
        "tokenizer_class": "DreamTokenizer",
        "unk_token": None,
    }


def added_tokens_decoder(family: Family) -> dict[str, dict[str, Any]]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        str(family.token_id(content)): {"content": content, **flags, "special": True}
        for content in family.specials
    }


def llada_config() -> dict[str, Any]:
    return {
        "activation_type": "silu",
        "alibi": False,
        "architectures": ["LLaDAModelLM"],
        "attention_dropout": 0.0,
        "attention_layer_norm": False,
        "bias_for_layer_norm": False,
        "block_group_size": 1,
        "block_type": "llama",
        "d_model": LLADA.hidden,
        "embedding_dropout": 0.0,
        "embedding_size": EMBEDDING_ROWS,
        "eos_token_id": LLADA.eos_id,
        "flash_attention": False,
        "include_bias": False,
        "include_qkv_bias": LLADA.qkv_bias,
        "init_device": "cpu",
        "init_fn": "mitchell",
        "input_emb_norm": False,
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "mask_token_id": LLADA.mask_id,
        "max_sequence_length": CONTEXT,
        "mlp_hidden_size": LLADA.inner,
        "mlp_ratio": 4,
        "model_type": "llada",
        "multi_query_attention": None,
        "n_heads": LLADA.heads,
        "n_kv_heads": LLADA.kv_heads,
        "n_layers": LLADA.layers,
        "pad_token_id": LLADA.eos_id,
        "residual_dropout": 0.0,
        "rms_norm_eps": LLADA.norm_eps,
        "rope": True,
        "rope_full_precision": True,
        "rope_theta": LLADA.rope_theta,
        "scale_logits": False,
        "torch_dtype": "bfloat16",
        "vocab_size": EMBEDDING_ROWS,
        "weight_tying": False,
    }


def dream_config() -> dict[str, Any]:
    return {
        "architectures": ["DreamModel"],
        "attention_dropout": 0.0,
        "auto_map": {
            "AutoConfig": "configuration_dream.DreamConfig",
            "AutoModel": "modeling_dream.DreamModel",
        },
        "bos_token_id": DREAM.eos_id,
        "eos_token_id": DREAM.eos_id,
        "hidden_act": "silu",
        "hidden_size": DREAM.hidden,
        "initializer_range": 0.02,
        "intermediate_size": DREAM.inner,
        "mask_token_id": DREAM.mask_id,
        "max_position_embeddings": CONTEXT,
        "max_window_layers": DREAM.layers,
        "model_type": "Dream",
        "num_attention_heads": DREAM.heads,
        "num_hidden_layers": DREAM.layers,
        "num_key_value_heads": DREAM.kv_heads,
        "pad_token_id": DREAM.eos_id,
        "rms_norm_eps": DREAM.norm_eps,
        "rope_scaling": None,
        "rope_theta": DREAM.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": EMBEDDING_ROWS,
    }


def dream_generation_config() -> dict[str, Any]:
    return {
        "alg": "origin",
        "alg_temp": None,
        "bos_token_id": DREAM.eos_id,
        "eos_token_id": DREAM.eos_id,
        "eps": 0.001,
        "mask_token_id": None,
        "pad_token_id": DREAM.eos_id,
        "steps": 512,
        "temperature": 0.0,
        "top_k": None,
        "top_p": None,
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE, help="holds both checkpoints")
    out = parser.parse_args().out
    for family in FAMILIES:
        write(family, out / f"tiny-{family}")


if __name__ == "__main__":
    main()
