"""Signals, and processes that die; each test has a server of its own."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from server.conftest import Oracle
from server.harness import (
    START_SECONDS,
    TINY,
    Answer,
    Serving,
    Stream,
    children,
    is_running,
    launched,
    serving,
    wait_for,
)

from sangam_backend.background import free_ports
from sangam_backend.config import EngineConfig
from sangam_backend.frontend import Prompt
from sangam_backend.launcher import (
    Deployment,
    Endpoints,
    Pool,
    Server,
    find_triton,
    write_repository,
)

IDS = [72, 101, 108, 108, 111]
LONG = {"unmasking": "quota", "ignore_eos": True, "max_tokens": 128}
FAILING_MODEL = Path(__file__).parent / "failing_model" / "1" / "model.py"


def start_long_stream(server: Serving) -> Stream:
    stream = Stream(server.grpc_url)
    stream.send({"input_ids": IDS, "stream": True, "sampling_parameters": LONG})
    wait_for(lambda: server.gauges()["sangam_requests_decoding"] > 0, 5)
    return stream


@contextlib.contextmanager
def ends_within(server: Serving, seconds: float) -> Iterator[None]:
    """The command and all that it started end, with status 0, and leave no shared memory."""
    triton, stubs = server.tree()
    yield
    server.process.wait(seconds)
    assert server.process.returncode == 0, server.log.read_text()
    assert [pid for pid in (triton, *stubs) if is_running(pid)] == []
    assert server.regions() == []


def test_a_stream_finishes_after_sigterm(tmp_path: Path, oracle: Oracle) -> None:
    with serving(tmp_path / "log") as server:
        assert len(server.regions()) == 1
        stream = start_long_stream(server)
        with ends_within(server, 15):
            server.process.terminate()
            answer = stream.receive()
            stream.close()
        assert (answer.error, answer.finals) == (None, 1)
        assert answer.ids == oracle.answer(Prompt(input_ids=IDS), LONG).ids


def test_an_idle_stream_holds_the_exit_no_longer_than_the_grace_time(tmp_path: Path) -> None:
    with serving(tmp_path / "log", "--grace", "4") as server:
        stream = Stream(server.grpc_url)
        stream.send({"input_ids": IDS, "max_tokens": 4})
        assert stream.receive().error is None
        with ends_within(server, 6):
            server.process.terminate()
        stream.close()


def test_ctrl_c_ends_all_processes_even_after_a_dead_stub(tmp_path: Path) -> None:
    with serving(tmp_path / "log", "--grace", "5") as server:
        with ends_within(server, 10):
            _, (stub,) = server.tree()
            os.kill(stub, signal.SIGKILL)
            answer = server.ask({"input_ids": IDS})
            server.process.send_signal(signal.SIGINT)
        assert answer.error is not None
        assert "is not healthy" in answer.error


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with serving(tmp_path / "log") as server:
        stream = start_long_stream(server)
        with ends_within(server, 5):
            server.process.send_signal(signal.SIGINT)
            wait_for(lambda: "Signal (15) received" in server.log.read_text(), 5)
            server.process.send_signal(signal.SIGINT)
        stream.close()


def test_sigterm_while_the_server_starts(tmp_path: Path) -> None:
    with launched(tmp_path / "log") as server:
        wait_for(lambda: bool(children(server.process.pid)), START_SECONDS, server.process)
        with ends_within(server, 20):
            server.process.terminate()
        assert "Sangam is ready" not in server.log.read_text()


def test_a_stub_follows_its_killed_server(tmp_path: Path) -> None:
    with serving(tmp_path / "log") as server:
        triton, (stub,) = server.tree()
        # Without the command, which would end the whole group.
        server.process.send_signal(signal.SIGSTOP)
        os.kill(triton, signal.SIGKILL)
        wait_for(lambda: not is_running(stub), 2)
        server.process.send_signal(signal.SIGCONT)
        server.process.wait(10)
        assert server.process.returncode == 1
        assert "sangam: the server ended by itself with status -9" in server.log.read_text()
        assert server.regions() == []


@pytest.fixture
def failing_server(tmp_path: Path) -> Server:
    config = EngineConfig(model=str(TINY), device="cpu")
    write_repository(tmp_path / "models", Deployment("colocated", {"sangam": Pool()}), config)
    (tmp_path / "models/sangam/1/model.py").write_text(FAILING_MODEL.read_text())
    endpoints = Endpoints("127.0.0.1", *free_ports(3))
    return Server(find_triton(tmp_path), tmp_path / "models", endpoints, grace=5)


def test_a_dead_engine_answers_everybody_and_ends_its_process(failing_server: Server) -> None:
    with failing_server as server:
        assert server.wait_until_ready(START_SECONDS)
        (stub,) = children(server.process.pid)
        url = f"127.0.0.1:{server.endpoints.grpc_port}"
        streams = [Stream(url) for _ in range(4)]
        prompts = [IDS, IDS, IDS, [13, 13, 13]]
        for stream, prompt in zip(streams, prompts):
            stream.send({"input_ids": prompt, "sampling_parameters": LONG})
        for stream in streams:
            answer = stream.receive()
            assert answer == Answer(
                error="[INTERNAL] the engine failed: RuntimeError('poisoned')", finals=answer.finals
            )
        wait_for(lambda: not is_running(stub), 2)
        streams[0].send({"input_ids": IDS})
        assert streams[0].receive().error is not None
        for stream in streams:
            stream.close()
