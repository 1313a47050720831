"""Checkpoints in the HuggingFace format, found and loaded by architecture."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sangam_backend.config import ConfigError, EngineConfig, ModelConfig
from sangam_backend.models import dream, llada, weights
from sangam_backend.models.checkpoint import TensorNames
from sangam_backend.models.transformer import Transformer


class Architecture(NamedTuple):
    parse: Callable[[Mapping[str, Any]], ModelConfig]
    names: TensorNames


ARCHITECTURES = {
    "LLaDAModelLM": Architecture(llada.parse, llada.NAMES),
    "DreamModel": Architecture(dream.parse, dream.NAMES),
}


def find_checkpoint(model: str, load_format: str) -> Path:
    """The checkpoint's directory; a hub id is looked up in the cache, then downloaded.

    Raises:
        ConfigError: neither a directory nor a hub id that can be had.
    """
    path = Path(model)
    if path.is_dir():
        return path.resolve()
    if path.is_absolute() or model.startswith(".") or model.count("/") != 1:
        raise ConfigError(f"model is {model!r}: no such directory, and not a hub id (owner/name)")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.txt", "*.jinja"]
    if load_format == "safetensors":
        patterns.append("*.safetensors")
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"model is {model!r}: no such directory, and the hub does not give it: {reason}"
        ) from error


def read_config(directory: Path) -> tuple[ModelConfig, TensorNames]:
    """Reads config.json and generation_config.json.

    Raises:
        ConfigError: a missing or malformed file, or an architecture or setting not served.
    """
    values = _read_json(directory / "config.json")
    found = values.get("architectures") or [None]
    architecture = ARCHITECTURES.get(found[0])
    if architecture is None:
        known = " and ".join(ARCHITECTURES)
        raise ConfigError(
            f"{directory}/config.json: architecture is {found[0]!r} "
            f"(model_type {values.get('model_type')!r}), served are {known}"
        )
    config = architecture.parse(values)
    generation_file = directory / "generation_config.json"
    generation = _read_json(generation_file) if generation_file.exists() else {}
    stops = _token_ids(values.get("eos_token_id")) | _token_ids(generation.get("eos_token_id"))
    return dataclasses.replace(config, stop_token_ids=stops), architecture.names


def check_checkpoint(config: EngineConfig) -> Path:
    """Checks all that can be checked without reading weights.

    Raises:
        ConfigError: what `load_model` would raise.
    """
    directory = find_checkpoint(config.model, config.load_format)
    model_config, names = read_config(directory)
    limit_length(model_config, config)
    if config.load_format == "safetensors":
        weights.check(model_config, names, directory)
    return directory


def load_model(config: EngineConfig, dtype: torch.dtype, device: torch.device) -> Transformer:
    """Loads a checkpoint onto the device.

    Raises:
        ConfigError: a wrong architecture, or a file or tensor that is missing or damaged.
    """
    directory = find_checkpoint(config.model, config.load_format)
    model_config, names = read_config(directory)
    model = weights.allocate(limit_length(model_config, config), dtype, device)
    if config.load_format == "dummy":
        weights.randomize(model, names)
    else:
        weights.load(model, names, directory)
    return model


def limit_length(model: ModelConfig, config: EngineConfig) -> ModelConfig:
    """The model's config with its length cut to what the instance serves."""
    if config.max_sequence_length > model.max_sequence_length:
        raise ConfigError(
            f"max_sequence_length is {config.max_sequence_length}, "
            f"the model is limited to {model.max_sequence_length}"
        )
    served = config.max_sequence_length or model.max_sequence_length
    return dataclasses.replace(model, max_sequence_length=served)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return values


def _token_ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)
