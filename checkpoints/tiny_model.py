"""The small models as they are trained, and how their weights are written."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from make_tiny import CONTEXT, EMBEDDING_ROWS, FAMILIES, HEAD_DIM, Family, write_json
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

NAMES = {
    "llada": {
        "layer": "model.transformer.blocks.{}.",
        "embedding": "model.transformer.wte",
        "attention_norm": "attn_norm",
        "qkv": ("q_proj", "k_proj", "v_proj"),
        "output": "attn_out",
        "mlp_norm": "ff_norm",
        "gate_up": ("ff_proj", "up_proj"),
        "down": "ff_out",
        "final_norm": "model.transformer.ln_f",
        "head": "model.transformer.ff_out",
    },
    "dream": {
        "layer": "model.layers.{}.",
        "embedding": "model.embed_tokens",
        "attention_norm": "input_layernorm",
        "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "output": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "down": "mlp.down_proj",
        "final_norm": "model.norm",
        "head": "lm_head",
    },
}


class Sequences(NamedTuple):
    """Token sequences that lie one after the other."""

    offsets: Tensor
    """Where each begins, then where the last one ends: int32 [sequences + 1]."""
    longest: int
    """No sequence has more tokens."""

    def owners(self, tokens: int) -> Tensor:
        """The sequence of each token [tokens]."""
        places = torch.arange(tokens, dtype=torch.int32, device=self.offsets.device)
        return torch.searchsorted(self.offsets[1:], places, right=True)

    def positions(self, tokens: int) -> Tensor:
        """Each token's place in its sequence [tokens]."""
        places = torch.arange(tokens, device=self.offsets.device)
        return places - self.offsets[self.owners(tokens)]


def sequences_of(lengths: list[int], device: torch.device) -> Sequences:
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    return Sequences(offsets.to(device), max(lengths))


def attend(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences) -> Tensor:
    """Attention within each sequence; all are [tokens, heads, HEAD_DIM]."""
    if q.is_cuda:
        offsets, longest = sequences
        attended = varlen_attn(q, k, v, offsets, offsets, longest, longest)
        assert isinstance(attended, Tensor)
        return attended
    parts = []
    for start, end in pairwise(sequences.offsets.tolist()):
        if end > start:
            queries, keys, values = (x[start:end].transpose(0, 1) for x in (q, k, v))
            parts.append(F.scaled_dot_product_attention(queries, keys, values))
    return torch.cat(parts, dim=1).transpose(0, 1)


class Layer(nn.Module):
    def __init__(self, family: Family) -> None:
        super().__init__()
        hidden, inner = family.hidden, family.inner
        self.heads = [family.heads, family.kv_heads, family.kv_heads]
        self.attention_norm = nn.RMSNorm(hidden, family.norm_eps)
        self.qkv = nn.Linear(hidden, sum(self.heads) * HEAD_DIM, bias=family.qkv_bias)
        self.output = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden, family.norm_eps)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sequences: Sequences) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = heads.split(self.heads, dim=1)
        shared = self.heads[0] // self.heads[1]
        k, v = rotate(k, cos, sin).repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        attended = attend(rotate(q, cos, sin), k, v, sequences)
        x = x + self.output(attended.flatten(1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, family: Family) -> None:
        super().__init__()
        self.embedding = nn.Embedding(EMBEDDING_ROWS, family.hidden)
        self.layers = nn.ModuleList(Layer(family) for _ in range(family.layers))
        self.final_norm = nn.RMSNorm(family.hidden, family.norm_eps)
        self.head = nn.Linear(family.hidden, EMBEDDING_ROWS, bias=False)
        exponents = torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM
        angles = torch.outer(torch.arange(CONTEXT).float(), family.rope_theta**-exponents)
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2), persistent=False)
        self.cos: Tensor
        self.sin: Tensor
        self._initialise()

    def _initialise(self) -> None:
        residual = 1 / math.sqrt(2 * len(self.layers))
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                into_residual = name.endswith(("output.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 * (residual if into_residual else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def hidden(self, ids: Tensor, sequences: Sequences) -> Tensor:
        """Normalised hidden states [tokens, hidden]."""
        x = self.embedding(ids)
        positions = sequences.positions(len(ids))
        cos, sin = self.cos[positions, None], self.sin[positions, None]
        for layer in self.layers:
            x = layer(x, cos, sin, sequences)
        return self.final_norm(x)  # type: ignore[no-any-return]

    def forward(self, ids: Tensor, sequences: Sequences) -> Tensor:
        return self.head(self.hidden(ids, sequences))  # type: ignore[no-any-return]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def save_weights(model: Model, family: str, directory: Path) -> None:
    """bf16 safetensors with the released models' names: LLaDA's in one file, Dream's in two."""
    tensors = {
        name: tensor.detach().bfloat16().contiguous().cpu()
        for name, tensor in named_tensors(model, family)
    }
    if family == "llada":
        save_file(tensors, directory / "model.safetensors")
    else:
        save_shards(tensors, directory)


def save_file(tensors: dict[str, Tensor], path: Path) -> None:
    path.write_bytes(save(tensors, metadata={"format": "pt"}))


def save_shards(tensors: dict[str, Tensor], directory: Path) -> None:
    names = list(tensors)
    shards = [names[: len(names) // 2], names[len(names) // 2 :]]
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file({name: tensors[name] for name in shard}, directory / file)
        places |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))},
    )


def named_tensors(model: Model, family: str) -> Iterator[tuple[str, Tensor]]:
    names, shape = NAMES[family], FAMILIES[family]
    sizes = {
        "qkv": [count * HEAD_DIM for count in (shape.heads, shape.kv_heads, shape.kv_heads)],
        "gate_up": [shape.inner, shape.inner],
    }
    for parameter, tensor in model.named_parameters():
        *path, module, kind = parameter.split(".")
        prefix = str(names["layer"]).format(path[1]) if path else ""
        name = names[module]
        if isinstance(name, str):
            yield f"{prefix}{name}.{kind}", tensor
        else:
            for part, piece in zip(name, tensor.split(sizes[module])):
                yield f"{prefix}{part}.{kind}", piece
