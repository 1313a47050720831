"""Builds the transformer: packed weights from safetensors files, or random ones."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sangam_backend.config import ConfigError, ModelConfig
from sangam_backend.models.checkpoint import TensorNames
from sangam_backend.models.transformer import Layer, Transformer, rope_table

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def allocate(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Transformer:
    """A transformer of uninitialised weights on the device."""

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    hidden, inner = config.hidden_size, config.intermediate_size
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    layers = [
        Layer(
            attention_norm=empty(hidden),
            qkv=empty(qkv, hidden),
            qkv_bias=empty(qkv) if config.qkv_bias else None,
            output=empty(hidden, hidden),
            mlp_norm=empty(hidden),
            gate_up=empty(2 * inner, hidden),
            down=empty(hidden, inner),
        )
        for _ in range(config.num_layers)
    ]
    return Transformer(
        config=config,
        embedding=empty(config.vocab_size, hidden),
        layers=layers,
        final_norm=empty(hidden),
        head=empty(config.vocab_size, hidden),
        rope=rope_table(config.head_dim, config.max_sequence_length, config.rope_theta, device),
    )


def named_views(model: Transformer, names: TensorNames) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of the checkpoint with the part of the packed weights that it fills."""
    config = model.config
    kv = config.num_kv_heads * config.head_dim
    yield names.embedding, model.embedding
    for i, layer in enumerate(model.layers):
        q_part, k_part, v_part = layer.qkv.split([config.hidden_size, kv, kv])
        gate_part, up_part = layer.gate_up.chunk(2)
        views = {
            names.attention_norm: layer.attention_norm,
            names.q: q_part,
            names.k: k_part,
            names.v: v_part,
            names.output: layer.output,
            names.mlp_norm: layer.mlp_norm,
            names.gate: gate_part,
            names.up: up_part,
            names.down: layer.down,
        }
        if layer.qkv_bias is not None:
            parts = layer.qkv_bias.split([config.hidden_size, kv, kv])
            for name, part in zip((names.q, names.k, names.v), parts):
                views[name.removesuffix("weight") + "bias"] = part
        for name, view in views.items():
            yield name.format(i=i), view
    yield names.final_norm, model.final_norm
    yield names.head, model.head


def load(model: Transformer, names: TensorNames, directory: Path) -> None:
    """Fills the model from the checkpoint's safetensors files.

    Raises:
        ConfigError: a file that is missing or damaged, or a tensor that is missing or misshapen.
    """
    _visit(model, names, directory, lambda view, tensor: view.copy_(tensor()))


def check(config: ModelConfig, names: TensorNames, directory: Path) -> None:
    """Checks files, names and shapes as `load` does, reading no weights."""
    model = allocate(config, torch.bfloat16, torch.device("meta"))
    _visit(model, names, directory, lambda view, tensor: None)


def randomize(model: Transformer, names: TensorNames) -> None:
    """Random weights, drawn where the model lives: norms of one, the rest normal."""
    generator = torch.Generator(device=model.embedding.device).manual_seed(0)
    for _, view in named_views(model, names):
        if view.dim() == 1:
            view.fill_(1.0)
        else:
            view.normal_(0.0, 0.02, generator=generator)


def _visit(
    model: Transformer,
    names: TensorNames,
    directory: Path,
    use: Callable[[Tensor, Callable[[], Tensor]], object],
) -> None:
    """Calls `use` with each part of the packed weights and a reader of its tensor."""
    missing = dict(named_views(model, names))
    for path in _files(directory):
        try:
            with safe_open(path, framework="pt") as file:
                for name in sorted(missing.keys() & file.keys()):
                    view = missing.pop(name)
                    shape = file.get_slice(name).get_shape()
                    if shape != list(view.shape):
                        raise ConfigError(
                            f"{path}: tensor {name} has shape {shape}, "
                            f"config.json asks for {list(view.shape)}"
                        )
                    use(view, functools.partial(file.get_tensor, name))
        except (SafetensorError, OSError) as error:
            raise ConfigError(f"{path}: not a whole safetensors file: {error}") from error
    if missing:
        first = ", ".join(list(missing)[:3])
        raise ConfigError(f"{directory}: {len(missing)} tensors are missing, first {first}")


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    if index.exists():
        try:
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ConfigError(f"{index}: not a safetensors index: {error!r}") from error
        paths = [directory / shard for shard in shards]
    else:
        paths = [directory / SINGLE_FILE]
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"{path}: no such file")
    return paths
