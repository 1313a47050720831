"""The bidirectional transformer that LLaDA and Dream share, over packed ragged batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sangam_backend.config import ModelConfig
from sangam_backend.kernels.ops import TORCH, Ops


class Attention(Protocol):
    """Rotates, caches and attends; the model knows nothing of positions, pages or requests."""

    def run(self, layer: int, qkv: Tensor) -> Tensor:
        """Stores K/V of the batch's tokens and attends.

        Args:
            layer: Index of the layer.
            qkv: [tokens, (heads + 2 * kv_heads) * head_dim], not rotated. It may be overwritten.

        Returns:
            [tokens, heads * head_dim].
        """
        ...


@dataclass(slots=True)
class Layer:
    attention_norm: Tensor
    qkv: Tensor
    """[(heads + 2 * kv_heads) * head_dim, hidden]"""
    qkv_bias: Tensor | None
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    """[2 * intermediate, hidden], the gate first"""
    down: Tensor


@dataclass(slots=True)
class Transformer:
    config: ModelConfig
    embedding: Tensor
    layers: list[Layer]
    final_norm: Tensor
    head: Tensor
    """[vocab, hidden]"""
    rope: Tensor
    """[2, positions, head_dim]: cosines and sines, float32"""
    ops: Ops = TORCH

    def forward(self, ids: Tensor, attention: Attention) -> Tensor:
        """Runs the layers.

        Args:
            ids: [tokens], sequences packed one after the other.
            attention: Knows where each sequence starts and the positions of its tokens.

        Returns:
            The normalised hidden states, [tokens, hidden].
        """
        ops, eps = self.ops, self.config.rms_norm_eps
        norms = [layer.attention_norm for layer in self.layers[1:]] + [self.final_norm]
        residual = F.embedding(ids, self.embedding)
        h = ops.rms_norm(residual, self.layers[0].attention_norm, eps)
        for index, (layer, next_norm) in enumerate(zip(self.layers, norms)):
            attended = attention.run(index, ops.linear(h, layer.qkv, layer.qkv_bias))
            attended = ops.linear(attended, layer.output, None)
            h = ops.add_rms_norm(attended, residual, layer.mlp_norm, eps)
            h = ops.gated_linear(h, layer.gate_up)
            h = ops.add_rms_norm(ops.linear(h, layer.down, None), residual, next_norm, eps)
        return h

    def logits(self, hidden: Tensor) -> Tensor:
        """Raw logits [rows, vocab] of hidden states [rows, hidden], without the family's shift."""
        return self.ops.linear(hidden, self.head, None)


def rope_table(head_dim: int, positions: int, theta: float, device: torch.device) -> Tensor:
    """Cosines and sines [2, positions, head_dim] of rotary embeddings in the rotate-half form."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    angles = torch.outer(torch.arange(positions, device=device).float(), theta**-exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return torch.stack([angles.cos(), angles.sin()])


def split_and_rotate(
    qkv: Tensor, positions: Tensor, rope: Tensor, config: ModelConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated q [tokens, heads, head_dim], rotated k and plain v [tokens, kv_heads, head_dim]."""
    heads = qkv.unflatten(-1, (-1, config.head_dim))
    q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
    cos, sin = rope[:, positions, None]
    in_float32 = config.rope_in_float32
    return rotate(q, cos, sin, in_float32), rotate(k, cos, sin, in_float32), v


def rotate(x: Tensor, cos: Tensor, sin: Tensor, in_float32: bool) -> Tensor:
    """Rotates heads x [tokens, heads, head_dim] by angles [tokens, 1, head_dim]."""
    dtype = torch.float32 if in_float32 else x.dtype
    wide, cos, sin = x.to(dtype), cos.to(dtype), sin.to(dtype)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
