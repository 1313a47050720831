"""Which device, which dtype, and how many KV pages fit."""

from __future__ import annotations

import os

import torch

from sangam_backend.config import ConfigError, EngineConfig, ModelConfig
from sangam_backend.pages import PAGE_SIZE

REPLAYS = 5


def pick_device(name: str) -> torch.device:
    """Raises ConfigError for a device that this machine lacks."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device is {name!r}, must be auto, cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device is {name!r}, must be auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device is {name!r}, CUDA sees {torch.cuda.device_count()} devices")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def count_pages(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> int:
    """Pages of the KV pool, from the memory that is free once the weights are loaded.

    Raises:
        ConfigError: not even one block fits.
    """
    pages_of_sequence = -(-model.max_sequence_length // PAGE_SIZE)
    reserve = 0 if device.type == "cpu" else scratch_bytes(config, model, dtype)
    bytes_of_page = PAGE_SIZE * model.kv_size_per_token * dtype.itemsize
    if config.kv_cache_tokens:
        pages = config.kv_cache_tokens // PAGE_SIZE
    else:
        fitting = int(free_memory(device) * config.memory_utilization - reserve) // bytes_of_page
        pages = min(fitting, config.max_batch_size * pages_of_sequence)
    if pages * PAGE_SIZE <= config.block_length:
        raise ConfigError(
            f"the KV pool would hold {pages * PAGE_SIZE} tokens, no more than one block of "
            f"{config.block_length}: raise kv_cache_tokens or memory_utilization"
        )
    return pages


def scratch_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """What iterations and graphs need beside weights and KV pool, estimated generously."""
    logit_rows = config.max_batch_size * config.block_length
    tokens = max(logit_rows, config.max_tokens_per_iteration + model.max_sequence_length)
    per_token = 3 * model.intermediate_size + 8 * model.hidden_size
    numbers = 1.25 * logit_rows * model.vocab_size + 1.5 * tokens * per_token
    return int(numbers * dtype.itemsize) + (2 << 30)


def free_memory(device: torch.device) -> int:
    """Bytes."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def replay_milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    """The shortest of some replays."""
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return min(times)
