"""Loading checkpoints, and the forward against the published models' logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import goldens
import pytest
import torch
from safetensors.torch import load_file, save_file

from sangam_backend.config import ConfigError, EngineConfig
from sangam_backend.kernels.ops import CPU_MIN_ROWS, linear
from sangam_backend.models import check_checkpoint, find_checkpoint, load_model, read_config
from sangam_backend.reference import Predictor

CPU = torch.device("cpu")
TOLERANCE = 5e-4


@pytest.mark.parametrize("name", goldens.MODELS)
def test_logits_equal_the_published_model(name: str) -> None:
    model, _ = goldens.load(name)
    golden = load_file(goldens.GOLDEN / name / "forward.safetensors")
    predictor = Predictor(model, golden["ids"].shape[1])

    def raw(ids: torch.Tensor, start: int, end: int) -> torch.Tensor:
        predictor.attention.window = slice(start, end)
        return model.logits(model.forward(ids[start:end], predictor.attention))

    ids, revealed = golden["ids"][0], golden["ids_step2"][0]
    full = raw(ids, 0, len(ids))
    assert torch.allclose(full, golden["full_logits"][0], atol=TOLERANCE)
    block = golden["block_logits"][0]
    assert torch.allclose(raw(revealed, 24, 24 + len(block)), block, atol=TOLERANCE)
    raw(ids, 0, len(ids))
    suffix = golden["suffix_logits"][0]
    assert torch.allclose(raw(revealed, 24, len(ids)), suffix, atol=TOLERANCE)


def test_a_token_has_the_same_result_in_every_batch() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(300, 192), torch.randn(256, 192), torch.randn(256)
    whole = linear(x, weight, bias)
    for rows in (1, 2, 5, 8, 11, CPU_MIN_ROWS, 33, 129):
        assert torch.equal(linear(x[17 : 17 + rows], weight, bias), whole[17 : 17 + rows])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    target = tmp_path / "checkpoint"
    target.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(goldens.GOLDEN / "llada_gqa_tiny" / name, target)
    return target


def edit_config(checkpoint: Path, **values: Any) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_tensors(checkpoint: Path, **values: torch.Tensor | None) -> None:
    path = checkpoint / "model.safetensors"
    tensors = load_file(path) | values
    save_file({k: v for k, v in tensors.items() if v is not None}, path)


def refusal(checkpoint: Path) -> str:
    """The one error that the quick check and the loader both give."""
    config = EngineConfig(model=str(checkpoint))
    with pytest.raises(ConfigError) as checked:
        check_checkpoint(config)
    with pytest.raises(ConfigError) as loaded:
        load_model(config, torch.float32, CPU)
    assert str(checked.value) == str(loaded.value)
    return str(loaded.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "architecture is 'LlamaForCausalLM'"),
        ({"architectures": None}, "architecture is None"),
        ({"d_model": "64"}, "d_model is '64', must be a positive integer"),
        ({"mask_token_id": 512}, "mask_token_id is 512, must be a token id below 512"),
        ({"alibi": True}, "alibi is True, only False is served"),
        ({"n_kv_heads": 3}, "4 heads cannot share 3 KV heads"),
        ({"n_heads": 5}, "hidden size 64 does not split into 5 heads"),
        ({"mlp_hidden_size": 96}, "has shape [64, 128], config.json asks for [64, 96]"),
        ({"n_layers": 3}, "9 tensors are missing, first model.transformer.blocks.2.attn_norm"),
    ],
)
def test_a_config_that_does_not_fit(checkpoint: Path, values: Any, message: str) -> None:
    edit_config(checkpoint, **values)
    assert message in refusal(checkpoint)


def test_damaged_files(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    name = "model.transformer.ln_f.weight"
    whole = weights.read_bytes()
    edit_tensors(checkpoint, **{name: torch.zeros(63)})
    assert f"tensor {name} has shape [63], config.json asks for [64]" in refusal(checkpoint)
    edit_tensors(checkpoint, **{name: None})
    assert f"1 tensors are missing, first {name}" in refusal(checkpoint)
    weights.write_bytes(whole[: len(whole) // 2])
    assert f"{weights}: not a whole safetensors file" in refusal(checkpoint)
    weights.unlink()
    assert refusal(checkpoint) == f"{weights}: no such file"
    (checkpoint / "config.json").write_text("{")
    assert "config.json: not JSON" in refusal(checkpoint)
    (checkpoint / "config.json").unlink()
    assert "config.json: no such file" in refusal(checkpoint)


def test_a_missing_shard(checkpoint: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors: no such file" in refusal(checkpoint)


def test_shards_load_as_one_file_does(checkpoint: Path) -> None:
    config = EngineConfig(model=str(checkpoint))
    whole = load_model(config, torch.float32, CPU)
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    weight_map = {}
    for i, name in enumerate(tensors):
        shard = f"model-{i % 3}.safetensors"
        weight_map[name] = shard
    for shard in set(weight_map.values()):
        part = {name: tensors[name] for name in tensors if weight_map[name] == shard}
        save_file(part, checkpoint / shard)
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    sharded = load_model(config, torch.float32, CPU)
    assert torch.equal(sharded.layers[1].qkv, whole.layers[1].qkv)
    assert torch.equal(sharded.head, whole.head)


def test_models_that_are_not_there(tmp_path: Path) -> None:
    for model in (str(tmp_path / "none"), "./none", "none"):
        with pytest.raises(ConfigError, match="no such directory"):
            find_checkpoint(model, "safetensors")


def test_dummy_weights_need_only_the_config(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    config = EngineConfig(model=str(checkpoint), load_format="dummy")
    model = load_model(config, torch.bfloat16, CPU)
    assert model.head.dtype == torch.bfloat16
    assert 0.01 < float(model.layers[0].qkv.float().std()) < 0.03


def test_stop_tokens_come_from_both_configs(checkpoint: Path) -> None:
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [501, 502]}')
    config, _ = read_config(checkpoint)
    assert config.stop_token_ids == {501, 502}


def test_engine_config_names_what_is_wrong() -> None:
    for values, message in (
        ({}, "parameter model is missing"),
        ({"model": "x", "block_lenght": "3"}, "unknown parameter 'block_lenght'"),
        ({"model": "x", "block_length": "many"}, "block_length is 'many'"),
        ({"model": "x", "block_length": "0"}, "block_length is 0, must be from 1 to 128"),
        ({"model": "x", "dtype": "int8"}, "dtype is 'int8', must be one of"),
        ({"model": "x", "queue_order": "lifo"}, "queue_order is 'lifo', must be one of"),
    ):
        with pytest.raises(ConfigError, match=message):
            EngineConfig.from_strings(values)
