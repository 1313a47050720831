"""Which instances a server has, and the model repository that tells Triton."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import NamedTuple

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig as TritonModelConfig

from sangam_backend.config import ConfigError, EngineConfig
from sangam_backend.device import pick_device

REPOSITORY = Path(__file__).parent / "model_repository"


class Pool(NamedTuple):
    """The instances of one model."""

    instances: int = 1
    gpus: str = ""
    """Numbers of CUDA devices, with commas between, which the instances take in turn; empty leaves
    the engine's device as it is."""

    def devices(self, default: str) -> str:
        if not self.gpus:
            return default
        return ",".join(f"cuda:{gpu.strip()}" for gpu in self.gpus.split(","))


class Deployment(NamedTuple):
    mode: str
    pools: dict[str, Pool]
    """By the name of the model."""


def check_deployment(deployment: Deployment, config: EngineConfig) -> None:
    """Raises ConfigError for a pool without instances, or a device that this machine lacks."""
    for name, pool in deployment.pools.items():
        if pool.instances < 1:
            raise ConfigError(f"instances of {name} is {pool.instances}, must be at least 1")
        for device in pool.devices(config.device).split(","):
            pick_device(device)
    if config.prefill_overflow_tokens and deployment.mode != "hybrid":
        raise ConfigError(f"prefill_overflow_tokens is of the mode hybrid, not {deployment.mode}")


def write_repository(target: Path, deployment: Deployment, config: EngineConfig) -> None:
    """Copies a mode's model repository, with the settings written into its config.pbtxt files."""
    shutil.copytree(REPOSITORY / deployment.mode, target)
    settings = dataclasses.asdict(config)
    # What the repository says of these holds unless the settings say otherwise.
    kept = {"role"} if config.prefill_overflow_tokens else {"role", "prefill_overflow_tokens"}
    for name, pool in deployment.pools.items():
        path = target / name / "config.pbtxt"
        model = text_format.Parse(path.read_text(), TritonModelConfig())
        model.instance_group[0].count = pool.instances
        for setting, value in (settings | {"device": pool.devices(config.device)}).items():
            if setting not in kept:
                model.parameters[setting].string_value = str(value)
        path.write_text(text_format.MessageToString(model))
