"""Signals, and processes that die; each test has a server of its own."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server.conftest import Oracle
from server.harness import (
    ANSWER_SECONDS,
    START_SECONDS,
    TINY,
    Answer,
    Serving,
    Stream,
    launched,
    serving,
    wait_for,
)

from sangam_backend import supervisor, watch
from sangam_backend.background import free_ports
from sangam_backend.config import EngineConfig
from sangam_backend.deployment import Deployment, Pool, write_repository
from sangam_backend.handover import meeting_path
from sangam_backend.installation import find_triton
from sangam_backend.leftovers import claimed_name, directory_of, sweep
from sangam_backend.processes import children, is_running
from sangam_backend.prompt import Prompt
from sangam_backend.supervisor import Endpoints, Server

IDS = [72, 101, 108, 108, 111]
LONG = {"unmasking": "quota", "ignore_eos": True, "max_tokens": 128}
LONGER = LONG | {"max_tokens": 800}
FAILING_MODEL = Path(__file__).parent / "failing_model" / "1"


def start_stream(server: Serving, sampling: dict[str, Any]) -> Stream:
    stream = Stream(server.grpc_url)
    stream.send({"input_ids": IDS, "stream": True, "sampling_parameters": sampling})
    wait_for(lambda: server.gauges()["sangam_requests_decoding"] > 0)
    return stream


@contextlib.contextmanager
def ends(server: Serving) -> Iterator[None]:
    """The command and all that it started end, with status 0, and leave no shared memory."""
    triton, stubs = server.tree()
    engines = [engine for stub in stubs for engine in children(stub)]
    yield
    server.process.wait(ANSWER_SECONDS)
    assert server.process.returncode == 0, server.log.read_text()
    wait_for(lambda: not any(map(is_running, (triton, *stubs, *engines))))
    assert server.regions() == []


def test_a_stream_finishes_after_sigterm(tmp_path: Path, oracle: Oracle) -> None:
    with serving(tmp_path / "log") as server:
        assert server.regions() != []
        stream = start_stream(server, LONG)
        with ends(server):
            server.process.terminate()
            answer = stream.receive()
            stream.close()
        assert (answer.error, answer.finals) == (None, 1)
        assert answer.ids == oracle.answer(Prompt(input_ids=IDS), LONG).ids


@pytest.mark.parametrize("mode", ["disaggregated", "hybrid"])
def test_requests_of_several_blocks_finish_after_sigterm(
    mode: str, tmp_path: Path, oracle: Oracle
) -> None:
    with serving(tmp_path / "log", f"--mode={mode}") as server:
        stream = start_stream(server, LONGER)
        with ends(server):
            server.process.terminate()
            wait_for(lambda: server.http("/v2/models/sangam/ready")[0] != 200)
            late = server.ask({"input_ids": IDS})
            answer = stream.receive()
            stream.close()
        assert late.error is not None
        assert "unknown model" in late.error
        assert (answer.error, answer.finals) == (None, 1)
        assert answer.ids == oracle.answer(Prompt(input_ids=IDS), LONGER).ids


@pytest.mark.parametrize("mode", ["colocated", "disaggregated"])
def test_what_outlasts_the_grace_time_is_answered(mode: str, tmp_path: Path) -> None:
    with serving(tmp_path / "log", f"--mode={mode}", "--grace=1") as server:
        stream = Stream(server.grpc_url)
        stream.send({"input_ids": IDS, "stream": True, "sampling_parameters": LONGER})
        answer = Answer()
        stream.receive_into(answer)
        with ends(server):
            server.process.terminate()
            while answer.error is None:
                stream.receive_into(answer)
            stream.close()
        assert 0 < len(answer.ids) < 800
        assert answer.error.endswith("[UNAVAILABLE] the server is shutting down")
        assert "requests that outlast the grace time are ended" in server.log.read_text()


def test_an_idle_stream_does_not_hold_the_exit_up(tmp_path: Path) -> None:
    with serving(tmp_path / "log", "--grace=1000") as server:
        stream = Stream(server.grpc_url)
        stream.send({"input_ids": IDS, "max_tokens": 4})
        assert stream.receive().error is None
        with ends(server):
            server.process.terminate()
        stream.close()


def test_ctrl_c_ends_all_processes_even_after_a_dead_stub(tmp_path: Path) -> None:
    with serving(tmp_path / "log", "--grace", "5") as server, ends(server):
        _, (stub,) = server.tree()
        os.kill(stub, signal.SIGKILL)
        server.process.send_signal(signal.SIGINT)


def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with serving(tmp_path / "log") as server:
        stream = start_stream(server, LONGER)
        with ends(server):
            server.process.send_signal(signal.SIGINT)
            wait_for(lambda: server.http("/v2/models/sangam/ready")[0] != 200)
            server.process.send_signal(signal.SIGINT)
        assert stream.receive().error is not None
        stream.close()


def test_sigterm_while_the_server_starts(tmp_path: Path) -> None:
    with launched(tmp_path / "log") as server:
        wait_for(lambda: bool(children(server.process.pid)), START_SECONDS, server.process)
        with ends(server):
            server.process.terminate()
        assert "Sangam is ready" not in server.log.read_text()


def test_a_stub_follows_its_killed_server_and_another_is_started(tmp_path: Path) -> None:
    with serving(tmp_path / "log") as server:
        triton, (stub,) = server.tree()
        (engine,) = server.engines()
        # Without the command, which would end the whole group.
        server.process.send_signal(signal.SIGSTOP)
        os.kill(triton, signal.SIGSTOP)
        # Meanwhile the stub calls into its server, which never returns.
        time.sleep(3)
        os.kill(triton, signal.SIGKILL)
        wait_for(lambda: not (is_running(stub) or is_running(engine)))
        server.process.send_signal(signal.SIGCONT)
        wait_until_answering(server)
        assert (
            "sangam: the server ended by itself with status -9; it is started again in 0 s"
            in server.log.read_text()
        )


def wait_until_answering(server: Serving) -> None:
    def answers() -> bool:
        try:
            return server.generate({"text_input": "a", "max_tokens": 4})[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    wait_for(answers, START_SECONDS)


@pytest.mark.parametrize("mode", ["colocated", "disaggregated"])
def test_an_idle_server_whose_stub_dies_loads_its_models_again(tmp_path: Path, mode: str) -> None:
    with serving(tmp_path / "log", f"--mode={mode}") as server:
        triton, stubs = server.tree()
        os.kill(stubs[0], signal.SIGKILL)
        wait_for(lambda: not set(stubs) & set(children(triton)))
        wait_until_answering(server)
        assert server.tree()[0] == triton
        assert "a stub process has died; the models are loaded again" in server.log.read_text()


def test_requests_of_a_dead_stub_end_with_its_server(tmp_path: Path) -> None:
    """Triton would keep them for ever."""
    with serving(tmp_path / "log") as server:
        triton, (stub,) = server.tree()
        stream = start_stream(server, LONG)
        os.kill(stub, signal.SIGKILL)
        assert stream.receive().error is not None
        stream.close()
        wait_until_answering(server)
        assert server.tree()[0] != triton
        assert "a stub process has died; it is started again in 0 s" in server.log.read_text()


def test_all_processes_end_with_a_killed_command(tmp_path: Path) -> None:
    with serving(tmp_path / "log", "--mode=disaggregated") as server:
        triton, stubs = server.tree()
        pids = [triton, *stubs, *server.engines("sangam_prefill"), *server.engines("sangam_decode")]
        assert len(pids) == 5
        server.process.kill()
        server.process.wait()
        wait_for(lambda: not any(map(is_running, pids)))
        (lock,) = [path for path in server.regions() if path.suffix == ".lock"]
        left = [*server.regions(), directory_of(lock.stem), meeting_path(triton)]
        with claimed_name() as running:
            sweep()
            assert directory_of(running).exists()
        assert [path for path in left if path.exists()] == []


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """One without the command."""
    config = EngineConfig(model=str(TINY), device="cpu")
    write_repository(tmp_path / "models", Deployment("colocated", {"sangam": Pool()}), config)
    endpoints = Endpoints("127.0.0.1", *free_ports(3))
    with claimed_name() as name:
        yield Server(find_triton(tmp_path), tmp_path / "models", endpoints, START_SECONDS, 5, name)


@contextlib.contextmanager
def watched(server: Server) -> Iterator[Future[int]]:
    """The exit status, with the command's loop in a thread."""
    with server, ThreadPoolExecutor(1) as pool:
        assert server.wait_until_ready()
        yield pool.submit(server.wait)
        server.stopping = True


def test_a_frozen_stub(own_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "FROZEN_SECONDS", 4.0)
    with watched(own_server) as status:
        first = own_server.process.pid
        (stub,) = children(first)
        time.sleep(6)
        assert own_server.process.pid == first
        os.kill(stub, signal.SIGSTOP)
        wait_for(lambda: own_server.process.pid != first)
        wait_for(own_server.wait_until_ready, START_SECONDS)
        stream = Stream(f"127.0.0.1:{own_server.endpoints.grpc_port}")
        stream.send({"input_ids": IDS, "max_tokens": 4})
        assert stream.receive().error is None
        stream.close()
        assert not status.done()


def test_restarts_are_given_up(own_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "MOST_RESTARTS", 2)
    with watched(own_server) as status:
        shutil.rmtree(own_server.repository)
        os.kill(own_server.process.pid, signal.SIGKILL)
        assert status.result(30) == 1


def test_a_dead_engine_answers_everybody_and_is_started_again(own_server: Server) -> None:
    shutil.copytree(FAILING_MODEL, own_server.repository / "sangam/1", dirs_exist_ok=True)
    with own_server as server:
        assert server.wait_until_ready()
        (stub,) = children(server.process.pid)
        (engine,) = children(stub)
        stream = Stream(f"127.0.0.1:{server.endpoints.grpc_port}")
        others = [Stream(f"127.0.0.1:{server.endpoints.grpc_port}") for _ in range(3)]
        for other in others:
            other.send({"input_ids": IDS, "sampling_parameters": LONG})
        time.sleep(0.3)
        stream.send({"input_ids": [13, 13, 13], "sampling_parameters": LONG})
        for each in (stream, *others):
            answer = each.receive()
            assert answer == Answer(
                error="[INTERNAL] the engine failed: RuntimeError('poisoned')", finals=answer.finals
            )
        wait_for(lambda: not is_running(engine))
        # It waits for the new engine process.
        stream.send({"input_ids": IDS, "sampling_parameters": {"max_tokens": 4}})
        assert stream.receive().error is None
        assert children(stub) not in ([], [engine])
        for each in (stream, *others):
            each.close()


def test_a_killed_engine_while_clients_wait_for_it(tmp_path: Path, oracle: Oracle) -> None:
    """Requests that the engine has not yet taken go to the next one."""
    with serving(tmp_path / "log", "--backlog", "1") as server:
        taken = start_stream(server, LONG)
        waiting = Stream(server.grpc_url)
        waiting.send({"input_ids": IDS, "sampling_parameters": LONG})
        (engine,) = server.engines()
        os.kill(engine, signal.SIGKILL)
        assert taken.receive().error == "[UNAVAILABLE] the engine process ended with signal 9"
        assert waiting.receive().ids == oracle.answer(Prompt(input_ids=IDS), LONG).ids
        wait_for(lambda: server.outcomes("length") == 1)
        assert server.outcomes("unavailable") == 1
        for stream in (taken, waiting):
            stream.close()
        assert "it is started again" in server.log.read_text()
