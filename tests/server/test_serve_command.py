"""What `sangam serve` refuses, and what the server it starts refuses."""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from server.harness import TINY, Serving, run_sangam

from sangam_backend import cli
from sangam_backend.background import free_ports

REFUSAL_SECONDS = 15
LAST = "model.transformer.blocks.6.ff_out.weight"


def serve(monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    """The line on stderr with which the command ends."""
    ports = free_ports(3)
    defaults = ["--http-port", "--grpc-port", "--metrics-port"]
    named = [word for pair in zip(defaults, map(str, ports)) for word in pair]
    monkeypatch.setattr("sys.argv", ["sangam", "serve", *named, "--model", str(TINY), *options])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    line = ended.value.code
    assert isinstance(line, str)
    assert line.startswith("sangam: ")
    assert "\n" not in line
    return line


def change_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_weights(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def drop_tensor(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.pop(LAST))


def reshape_tensor(folder: Path) -> None:
    def cut(tensors: dict[str, Any]) -> None:
        tensors[LAST] = tensors[LAST][:-1].contiguous()

    change_weights(folder, cut)


def truncate_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def drop_config(folder: Path) -> None:
    (folder / "config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (drop_config, ["config.json: no such file"]),
        (
            lambda folder: change_config(folder, architectures=["LlamaForCausalLM"]),
            ["config.json: architecture is 'LlamaForCausalLM'", "LLaDAModelLM and DreamModel"],
        ),
        (drop_tensor, [LAST]),
        (reshape_tensor, [LAST, "255", "256"]),
        (truncate_weights, ["model.safetensors"]),
    ],
)
def test_a_damaged_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
    words: list[str],
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    damage(folder)
    line = serve(monkeypatch, "--model", str(folder))
    assert all(word in line for word in [str(folder), *words]), line


def test_the_real_command_refuses_on_one_line() -> None:
    start = time.monotonic()
    done = run_sangam("serve", "--model", "/nowhere/at/all")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "sangam: model is '/nowhere/at/all': no such directory, and not a hub id (owner/name)\n"
    )
    assert time.monotonic() - start < REFUSAL_SECONDS


def test_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = serve(monkeypatch, "--grpc-port", port)
    assert line.startswith(f"sangam: grpc_port {port}: cannot listen on 127.0.0.1: ")
    assert "in use" in line


def test_a_port_given_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    port = str(free_ports(1)[0])
    line = serve(monkeypatch, "--grpc-port", port, "--metrics-port", port)
    assert line.startswith(f"sangam: metrics_port {port}: cannot listen on")


@pytest.mark.parametrize("port", ["0", "-1", "65536"])
def test_no_such_port(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    line = serve(monkeypatch, "--http-port", port)
    assert line == f"sangam: http_port is {port}, must be from 1 to 65535"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--instances=0"], "instances of sangam is 0, must be at least 1"),
        (
            ["--mode=hybrid", "--decode-instances=0"],
            "instances of sangam_decode is 0, must be at least 1",
        ),
        (["--decode-instances=2"], "--decode-instances has no meaning in the mode colocated"),
        (["--mode=hybrid", "--gpus=0"], "--gpus has no meaning in the mode hybrid"),
        (
            ["--mode=disaggregated", "--prefill-overflow-tokens=9"],
            "prefill_overflow_tokens is of the mode hybrid, not disaggregated",
        ),
        (
            ["--mode=disaggregated", "--decode-gpus=99"],
            f"device is 'cuda:99', CUDA sees {torch.cuda.device_count()} devices",
        ),
    ],
)
def test_a_deployment_that_cannot_be(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert serve(monkeypatch, *options) == f"sangam: {message}"


def test_no_libpython(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", lambda _: str(tmp_path))
    line = serve(monkeypatch)
    assert f"{tmp_path}/libpython3." in line
    assert "no such file" in line


def test_no_server_named_installed_or_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.delenv("SANGAM_TRITONSERVER", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    line = serve(monkeypatch)
    assert line.startswith("sangam: no Triton server: set SANGAM_TRITONSERVER")


def test_a_named_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANGAM_TRITONSERVER", "/nowhere/tritonserver")
    line = serve(monkeypatch)
    assert line.startswith("sangam: /nowhere/tritonserver: no such file")


def test_numpy_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "__version__", "2.1.0")
    assert "NumPy is 2.1.0" in serve(monkeypatch)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/repository/index", {}),
        ("/v2/repository/models/sangam/unload", {}),
        ("/v2/repository/models/sangam/load", {}),
        ("/v2/systemsharedmemory/status", None),
        ("/v2/systemsharedmemory/region/x/register", {"key": "/x", "byte_size": 1}),
        ("/v2/cudasharedmemory/status", None),
        ("/v2/logging", None),
        ("/v2/trace/setting", None),
    ],
)
def test_administrative_endpoints_are_closed(
    server: Serving, path: str, body: dict[str, Any] | None
) -> None:
    status, answer = server.http(path, body)
    assert (status, answer) == (403, '{"error":"This API is restricted, expecting header '
                            "'sangam-admin-key'\"}")  # fmt: skip


def test_administrative_endpoints_are_closed_over_grpc(server: Serving) -> None:
    from tritonclient import grpc as tritongrpc

    client = tritongrpc.InferenceServerClient(server.grpc_url)
    for call in (
        client.get_model_repository_index,
        lambda: client.unload_model("sangam"),
        client.get_system_shared_memory_status,
        client.get_cuda_shared_memory_status,
        client.get_log_settings,
        client.get_trace_settings,
    ):
        with pytest.raises(tritongrpc.InferenceServerException, match="restricted"):
            call()
    assert client.is_model_ready("sangam")
    client.close()
