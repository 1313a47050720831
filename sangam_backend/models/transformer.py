"""The bidirectional transformer that LLaDA and Dream share, over packed ragged batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sangam_backend.config import ModelConfig

# MKL multiplies fewer rows than this with other kernels, whose sums differ in the last bit.
# With at least so many rows a token's result is the same in every batch.
CPU_MIN_ROWS = 16


class Attention(Protocol):
    """Attends over whatever cache it keeps; the model knows nothing of pages or requests."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Stores K/V of the batch's tokens and attends.

        Args:
            layer: Index of the layer.
            q: [tokens, heads, head_dim], rotated.
            k, v: [tokens, kv_heads, head_dim], k rotated.

        Returns:
            [tokens, heads, head_dim].
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

    def forward(self, ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Runs the layers.

        Args:
            ids, positions: [tokens], sequences packed one after the other.
            attention: Knows where each sequence starts.

        Returns:
            The normalised hidden states, [tokens, hidden].
        """
        config = self.config
        cos, sin = self.rope[:, positions, None]
        x = F.embedding(ids, self.embedding)
        for index, layer in enumerate(self.layers):
            h = rms_norm(x, layer.attention_norm, config.rms_norm_eps)
            q, k, v = self._split(linear(h, layer.qkv, layer.qkv_bias))
            q = rotate(q, cos, sin, config.rope_in_float32)
            k = rotate(k, cos, sin, config.rope_in_float32)
            x = x + linear(attention.run(index, q, k, v).flatten(1), layer.output)
            h = rms_norm(x, layer.mlp_norm, config.rms_norm_eps)
            gate, up = linear(h, layer.gate_up).chunk(2, dim=-1)
            x = x + linear(F.silu(gate) * up, layer.down)
        return rms_norm(x, self.final_norm, config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Raw logits [rows, vocab] of hidden states [rows, hidden], without the family's shift."""
        return linear(hidden, self.head)

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        heads = qkv.unflatten(-1, (-1, config.head_dim))
        q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        return q, k, v


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = x.shape[0]
    if x.device.type == "cpu" and rows < CPU_MIN_ROWS:
        return F.linear(F.pad(x, (0, 0, 0, CPU_MIN_ROWS - rows)), weight, bias)[:rows]
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises in float32 and multiplies by the weight in the dtype of the model."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def rope_table(head_dim: int, positions: int, theta: float, device: torch.device) -> Tensor:
    """Cosines and sines [2, positions, head_dim] of rotary embeddings in the rotate-half form."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    angles = torch.outer(torch.arange(positions, device=device).float(), theta**-exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, cos: Tensor, sin: Tensor, in_float32: bool) -> Tensor:
    """Rotates heads x [tokens, heads, head_dim] by angles [tokens, 1, head_dim]."""
    dtype = torch.float32 if in_float32 else x.dtype
    wide, cos, sin = x.to(dtype), cos.to(dtype), sin.to(dtype)
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
