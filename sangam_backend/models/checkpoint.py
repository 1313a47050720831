"""How a family's config.json and tensor names map onto the shared transformer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sangam_backend.config import ConfigError, ModelConfig


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of a family's tensors; those of a layer hold `{i}`, the layer's index."""

    embedding: str
    attention_norm: str
    q: str
    k: str
    v: str
    output: str
    mlp_norm: str
    gate: str
    up: str
    down: str
    final_norm: str
    head: str


class Fields:
    """Reads config.json; each error names the field, its value and what is served."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def count(self, name: str) -> int:
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"config.json: {name} is {value!r}, must be a positive integer")
        return value

    def number(self, name: str) -> float:
        value = self.values.get(name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
            raise ConfigError(f"config.json: {name} is {value!r}, must be a positive number")
        return float(value)

    def token(self, name: str, vocab_size: int) -> int:
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
            raise ConfigError(
                f"config.json: {name} is {value!r}, must be a token id below {vocab_size}"
            )
        return value

    def must_be(self, served: Mapping[str, Any]) -> None:
        for name, value in served.items():
            found = self.values.get(name, value)
            if found != value:
                raise ConfigError(f"config.json: {name} is {found!r}, only {value!r} is served")


def check_heads(config: ModelConfig) -> ModelConfig:
    if config.hidden_size % config.num_heads or config.head_dim % 2:
        raise ConfigError(
            f"config.json: hidden size {config.hidden_size} does not split into "
            f"{config.num_heads} heads of an even size"
        )
    if config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"config.json: {config.num_heads} heads cannot share {config.num_kv_heads} KV heads"
        )
    return config
