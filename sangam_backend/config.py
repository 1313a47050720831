"""What the engine is told before it starts: the model's shapes and the instance's limits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_type_hints

Family = Literal["llada", "dream"]
Cache = Literal["dual", "prefix", "none"]
Role = Literal["colocated", "prefill", "decode"]
QueueOrder = Literal["arrival", "fewest_remaining_blocks"]


class ConfigError(ValueError):
    """A checkpoint or a setting that cannot be served; the message names it."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and constants of a checkpoint, in one vocabulary for both families."""

    family: Family
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    """Rows of the embedding and of the LM head."""
    rope_theta: float
    rope_in_float32: bool
    """LLaDA rotates in float32, Dream in the dtype of the model."""
    rms_norm_eps: float
    qkv_bias: bool
    logit_shift: int
    """The token at position p is predicted by the logits of position p - logit_shift."""
    max_sequence_length: int
    mask_token_id: int
    stop_token_ids: frozenset[int]

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def kv_size_per_token(self) -> int:
        """Numbers that K and V of one position take over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


MAX_REQUEST_TIME = 3600.0
MAX_BLOCK_LENGTH = 128
"""The kernel that ranks a block's positions compares all pairs of them."""

PARSERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": lambda text: {"true": True, "false": False}[text.lower()],
}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of one instance. In config.pbtxt each is a parameter of the same name."""

    model: str
    """A checkpoint directory or a hub id."""
    role: Role = "colocated"
    """prefill hands each block over to an instance of the role decode."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto is bfloat16 on CUDA and float32 on a CPU."""
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    """dummy makes random weights of the config's shapes."""
    block_length: int = 32
    """Tokens of a block where a request names none."""
    cache: Cache = "dual"
    """What the forwards after a block's prefill run on: the block alone (dual), the block and all
    after it (prefix), or the whole sequence again (none)."""
    max_batch_size: int = 64
    """Requests that hold KV pages at once."""
    max_tokens_per_iteration: int = 2048
    """The token budget T of the scheduler."""
    queue_order: QueueOrder = "arrival"
    """Which of the waiting prefills comes first."""
    max_sequence_length: int = 0
    """Longest prompt plus canvas; 0 is the model's own limit."""
    max_prompt_tokens: int = 0
    """Longest prompt; 0 is what max_sequence_length allows."""
    max_output_tokens: int = 0
    """Largest max_tokens; 0 is what max_sequence_length allows."""
    kv_cache_tokens: int = 0
    """Positions of the KV pool; 0 sizes it from the free memory."""
    memory_utilization: float = 0.9
    """Share of the free device memory that the KV pool may take."""
    attention: Literal["auto", "sdpa"] = "auto"
    """auto is FlashInfer on CUDA and torch's SDPA on a CPU."""
    cuda_graphs: bool = True
    """Replay decode iterations as CUDA graphs."""
    fused_ops: bool = True
    """Norms, activations and rotations as single kernels on CUDA."""
    tuned_products: bool = True
    """Measure at the start which implementation is the fastest for each matrix product in a CUDA
    graph. Near ties may then be broken in another way after a restart."""
    overlap: bool = True
    """Launch an iteration while the one before runs, where its outcome is known beforehand."""
    prefill_overflow_tokens: int = 0
    """Waiting prefill tokens beyond which a prefill instance leaves a block's prefill to the decode
    instance (hybrid serving, which sets 4096); 0 never does."""
    max_queue_size: int = 4096
    """Requests that may wait for room in an instance that is alone; further ones are refused. Of
    several instances Triton keeps the one queue, which has no limit."""
    max_queue_tokens: int = 0
    """Prefill tokens that may wait in an instance; a new request beyond them is refused. 0 sets no
    limit but that of the backlog."""
    max_request_time: float = MAX_REQUEST_TIME
    """Seconds from when an instance reads a request; its own timeout can only shorten it."""
    backlog: int = 0
    """Requests an instance holds before it leaves more to the others; 0 is max_batch_size."""
    event_log: str = ""
    """A directory for CSV files of all iterations and requests; empty writes none."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("block_length", 1, MAX_BLOCK_LENGTH),
            ("max_batch_size", 1, 4096),
            ("max_tokens_per_iteration", 1, 1 << 20),
            ("max_sequence_length", 0, 1 << 20),
            ("max_prompt_tokens", 0, 1 << 20),
            ("max_output_tokens", 0, 1 << 20),
            ("max_queue_size", 1, 1 << 20),
            ("max_queue_tokens", 0, 1 << 40),
            ("kv_cache_tokens", 0, 1 << 40),
            ("memory_utilization", 0.01, 1.0),
            ("prefill_overflow_tokens", 0, 1 << 40),
            ("max_request_time", 0.001, 1e9),
            ("backlog", 0, 1 << 20),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise ConfigError(f"{name} is {value}, must be from {low} to {high}")
        hints = get_type_hints(EngineConfig)
        for name in ("role", "dtype", "load_format", "cache", "queue_order", "attention"):
            known = get_args(hints[name])
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, must be one of {known}")

    @classmethod
    def from_strings(cls, values: Mapping[str, str]) -> EngineConfig:
        """Builds a config from the parameters of a Triton model, which are all strings.

        Raises:
            ConfigError: an unknown name, or a value that does not parse.
        """
        fields = {field.name: field for field in dataclasses.fields(cls)}
        parsed: dict[str, Any] = {}
        for name, text in values.items():
            if name not in fields:
                raise ConfigError(f"unknown parameter {name!r}, known are {', '.join(fields)}")
            parse = PARSERS.get(str(fields[name].type), str)
            try:
                parsed[name] = parse(text)
            except (ValueError, KeyError):
                kind = fields[name].type
                raise ConfigError(f"{name} is {text!r}, must be of type {kind}") from None
        if not parsed.get("model"):
            raise ConfigError("parameter model is missing: a checkpoint directory or a hub id")
        return cls(**parsed)
