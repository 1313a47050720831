"""What others see of a server, and what it takes from them."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import grpc
import pytest
import torch
from sangam_client import Client, SangamError
from server.harness import SANGAM, TINY, Serving, serving

from sangam_backend.config import EngineConfig
from sangam_backend.frontend import open_frontend
from sangam_backend.handover import meeting_path, meeting_place
from sangam_backend.leftovers import directory_of, sweep
from sangam_backend.models import load_model
from sangam_backend.prompt import Prompt

KEY = "abc123"
HEADER = "triton-grpc-protocol-api-key"
MARK = "zebra-crossing-77"


def test_tls_and_a_key(tmp_path: Path) -> None:
    subject = ["-subj=/CN=localhost", "-addext=subjectAltName=DNS:localhost"]
    files = [f"-keyout={tmp_path}/server.key", f"-out={tmp_path}/server.crt"]
    words = [word for option in [*subject, *files] for word in option.split("=", 1)]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *words]
    subprocess.run(make, check=True, capture_output=True)
    options = [
        "--grpc-use-ssl=true",
        f"--grpc-server-cert={tmp_path}/server.crt",
        f"--grpc-server-key={tmp_path}/server.key",
        f"--grpc-restricted-protocol=inference:api-key={KEY}",
        f"--http-restricted-api=inference:api-key={KEY}",
    ]
    with serving(tmp_path / "log", "--", *options) as server:
        url = server.grpc_url.replace("127.0.0.1", "localhost")
        credentials = grpc.ssl_channel_credentials((tmp_path / "server.crt").read_bytes())
        with Client(url, credentials=credentials, headers={HEADER: KEY}) as client:
            assert client.generate([1], max_tokens=4, ignore_eos=True).num_output_tokens == 4
        with (
            Client(
                url, credentials=credentials, headers={HEADER: "abc"}, retry_seconds=60
            ) as client,
            pytest.raises(SangamError, match="restricted") as refused,
        ):
            client.generate([1])
        assert not refused.value.unavailable
        with Client(url, headers={HEADER: KEY}) as client, pytest.raises(SangamError):
            client.generate([1])
        assert server.generate({"text_input": "x"})[0] == 403
        reach = [f"--url={url}", f"--ca={tmp_path}/server.crt", f"--header={HEADER}={KEY}"]
        ask = [sys.executable, "-m", "sangam_client.cli", "--max-tokens=4", "Hello"]
        probe = [*SANGAM, "health", f"--metrics-url={server.metrics_url}"]
        for command in (ask, probe):
            subprocess.run([*command, *reach], check=True, timeout=60)
            assert subprocess.run([*command, reach[0]], timeout=60).returncode == 1


def test_files_are_for_the_own_user_alone(server: Serving) -> None:
    regions = server.regions()
    (lock,) = [path for path in regions if path.suffix == ".lock"]
    assert len(regions) > 1
    for path in [*regions, directory_of(lock.stem)]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_the_meeting_place_is_for_the_own_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    places = meeting_path(0).parent
    places.mkdir(mode=0o777)
    meeting_place(os.getpid())
    for path in (places, meeting_path(os.getpid())):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    monkeypatch.setattr(os, "getuid", partial(int, os.getuid() + 1))
    places.rename(meeting_path(0).parent)
    with pytest.raises(PermissionError, match="belongs to somebody else"):
        meeting_place(os.getpid())
    meeting_path(1 << 30).mkdir()
    sweep()
    assert meeting_path(1 << 30).exists()


def test_the_log_holds_no_prompts(server: Serving) -> None:
    texts = [
        server.generate({"text_input": MARK, "max_tokens": 4})[1],
        server.generate({"text_input": MARK, "nonsense": 1})[1],
        server.generate({"messages": f'[{{"role": "{MARK}"'})[1],
        server.generate(f'{{"text_input": "{MARK}'.encode())[1],
    ]
    assert MARK in texts[0]
    assert all("error" in text for text in texts[1:])
    assert MARK not in server.log.read_text()


def test_code_that_comes_with_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    # Unpickling it would fail.
    (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    for name, classes in (
        ("config.json", {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["evil.Tokenizer", None]}),
    ):
        values = json.loads((folder / name).read_text()) | {"auto_map": classes}
        (folder / name).write_text(json.dumps(values))
    config = EngineConfig(model=str(folder))
    frontend = open_frontend(
        load_model(config, torch.float32, torch.device("cpu")), config, pool_tokens=1024
    )
    assert frontend.new_request("", Prompt(text_input="Hello"), {}, stream=False).prompt
    assert not (tmp_path / "ran").exists()
