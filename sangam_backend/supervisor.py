"""A tritonserver that is started, watched, mended and ended."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sangam_backend.handover import meeting_path
from sangam_backend.installation import Triton
from sangam_backend.leftovers import make_private
from sangam_backend.processes import FROZEN_SECONDS
from sangam_backend.scrape import HELD_REQUESTS, sum_metrics
from sangam_backend.trace_context import TRACEPARENT
from sangam_backend.watch import Watch

MODEL_NAME = "sangam"
RESTRICTED = "model-repository,shared-memory,logging,trace"
GONE = "UNAVAILABLE"
CALL_SECONDS = 5.0
LEAVE_SECONDS = 2.0
DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of prctl(2)."""
POLL_SECONDS = 0.1
IDLE_POLLS = 3
LOOK_SECONDS = 2.0
MOST_RESTARTS = 5
RESTART_WINDOW = 600.0


class Endpoints(NamedTuple):
    host: str
    http_port: int
    grpc_port: int
    metrics_port: int

    @property
    def reachable_host(self) -> str:
        return "127.0.0.1" if self.host == "0.0.0.0" else self.host


class Server:
    """A tritonserver in a process group of its own, whose stubs end with it."""

    def __init__(
        self,
        triton: Triton,
        repository: Path,
        endpoints: Endpoints,
        startup_timeout: float,
        grace: float,
        region: str,
        options: Sequence[str] = (),
    ) -> None:
        """The names of its shared memory begin with `region`; it stays to be removed."""
        self.triton = triton
        self.repository = repository
        self.endpoints = endpoints
        self.startup_timeout = startup_timeout
        self.grace = grace
        self.stopping = False
        self._is_serving = False
        self._restarts: list[float] = []
        self._key = secrets.token_hex(16)
        self._region = region
        self._options = options

    def __enter__(self) -> Server:
        self._start()
        return self

    def _start(self) -> None:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        self.process = subprocess.Popen(
            self._command(),
            env=os.environ | {"PATH": path, "LD_LIBRARY_PATH": self.triton.library_path},
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )

    def __exit__(self, *_: object) -> None:
        drained = self._is_serving and self._drain(time.monotonic() + self.grace)
        if self._is_serving and not drained and self.process.poll() is None:
            _say("requests that outlast the grace time are ended")
        # The engines answer what still runs. An idle gRPC stream holds up even a server that has
        # nothing left to do.
        self.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LEAVE_SECONDS)
        self._kill()

    def _kill(self) -> None:
        # Whatever is left holds memory.
        self.send_signal(signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(meeting_path(self.process.pid), ignore_errors=True)

    def send_signal(self, number: signal.Signals) -> None:
        """To the server, its stubs and their engines, which share a group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _drain(self, deadline: float) -> bool:
        """Unloads the models, which refuses new requests and lets those that run finish.

        Returns:
            Whether they all did.

        On a signal Triton 24.10 would start no further step of an ensemble.
        """
        models = self._unload()
        idle_polls = 0
        while self.process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            index = self._call("/v2/repository/index")
            states = {each["name"]: each.get("state") for each in json.loads(index or b"[]")}
            if states and all(states.get(name) == GONE for name in models):
                return True
            # A gRPC stream that stays open keeps its model from going.
            idle_polls = idle_polls + 1 if self._is_idle() else 0
            if idle_polls == IDLE_POLLS:
                return True
        return False

    def _unload(self) -> list[str]:
        """Unloads the models, and names those that have instances."""
        models = [path.parent.parent.name for path in self.repository.glob("*/*/model.py")]
        for name in dict.fromkeys([MODEL_NAME, *models]):
            self._call(f"/v2/repository/models/{name}/unload")
        return models

    def _is_idle(self) -> bool:
        metrics = sum_metrics(self._metrics())
        return bool(metrics) and not any(metrics[name] for name in HELD_REQUESTS)

    def _metrics(self) -> str:
        return self._http(self.endpoints.metrics_port, "GET", "/metrics")[1].decode()

    def _call(self, path: str) -> bytes:
        """Posts to an administrative endpoint."""
        return self._http(self.endpoints.http_port, "POST", path)[1]

    def _http(
        self, port: int, method: str, path: str, timeout: float = CALL_SECONDS
    ) -> tuple[int, bytes]:
        """Status and body; 0 when the server does not answer."""
        host, key = self.endpoints.reachable_host, {"sangam-admin-key": self._key}
        connection = http.client.HTTPConnection(host, port, timeout=timeout)
        with contextlib.closing(connection):
            try:
                connection.request(method, path, "{}" if method == "POST" else None, key)
                response = connection.getresponse()
                return response.status, response.read()
            except (OSError, http.client.HTTPException):
                return 0, b""

    def wait_until_ready(self) -> bool:
        deadline = time.monotonic() + self.startup_timeout
        while time.monotonic() < deadline and self.process.poll() is None and not self.stopping:
            ready = self._is_ready()
            make_private(self._region)
            if ready:
                self._is_serving = True
                return True
            time.sleep(0.1)
        return False

    def _is_ready(self) -> bool:
        return self._http(self.endpoints.http_port, "GET", "/v2/health/ready")[0] == 200

    def failed_start(self) -> int:
        if self.stopping:
            return 0
        status = self.process.poll()
        if status is None:
            _say(f"the server was not ready after {self.startup_timeout:g} s")
        else:
            _say(f"the server ended with status {status} while it started, see its log")
        return 1

    def wait(self) -> int:
        """Waits for a signal; mends the server whenever something of it dies or freezes."""
        watch = Watch(self.process.pid, self._metrics)
        next_look = 0.0
        while not self.stopping:
            time.sleep(POLL_SECONDS)
            fault = None
            if (status := self.process.poll()) is not None:
                fault = f"the server ended by itself with status {status}"
            elif watch.has_lost_a_stub():
                fault = "a stub process has died"
                if self._is_idle() and self._reload(fault):
                    watch = Watch(self.process.pid, self._metrics)
                    continue
            elif time.monotonic() > next_look:
                next_look = time.monotonic() + LOOK_SECONDS
                if silent := watch.silence():
                    fault = f"no sign of {silent} for {FROZEN_SECONDS:g} s"
            if fault is not None:
                if not self._restart(fault):
                    break
                watch = Watch(self.process.pid, self._metrics)
        return 0 if self.stopping else 1

    def _reload(self, fault: str) -> bool:
        """Gives the models new stubs; Triton keeps the requests of the old ones for ever."""
        _say(f"{fault}; the models are loaded again")
        self._unload()
        # With an ensemble come the models that it is made of.
        path, port = f"/v2/repository/models/{MODEL_NAME}/load", self.endpoints.http_port
        answers: list[int] = []

        def load() -> None:
            answers.append(self._http(port, "POST", path, self.startup_timeout)[0])

        loading = threading.Thread(target=load, daemon=True)
        loading.start()
        while loading.is_alive() and not self.stopping:
            time.sleep(POLL_SECONDS)
        return answers == [200]

    def _restart(self, fault: str) -> bool:
        """Starts a new server, until one becomes ready."""
        while not self.stopping:
            now = time.monotonic()
            self._restarts = [when for when in self._restarts if now - when < RESTART_WINDOW]
            if len(self._restarts) == MOST_RESTARTS:
                _say(f"{fault}; that is given up after {MOST_RESTARTS} restarts")
                return False
            back_off = 2.0 ** len(self._restarts) - 1
            _say(f"{fault}; it is started again in {back_off:g} s")
            self._kill()
            time.sleep(back_off)
            self._restarts.append(now)
            self._start()
            if self.wait_until_ready():
                return True
            fault = "the server did not become ready"
        return False

    def _command(self) -> list[str]:
        host, http_port, grpc_port, metrics_port = self.endpoints
        return [
            str(self.triton.executable),
            f"--model-repository={self.repository}",
            f"--backend-directory={self.triton.backends}",
            "--model-control-mode=explicit",
            "--load-model=*",
            "--disable-auto-complete-config",
            f"--http-address={host}",
            f"--http-port={http_port}",
            f"--grpc-address={host}",
            f"--grpc-port={grpc_port}",
            f"--metrics-address={host}",
            f"--metrics-port={metrics_port}",
            f"--exit-timeout-secs={int(self.grace)}",
            f"--http-restricted-api={RESTRICTED}:sangam-admin-key={self._key}",
            f"--grpc-restricted-protocol={RESTRICTED}:sangam-admin-key={self._key}",
            "--grpc-keepalive-time=10000",
            "--grpc-keepalive-timeout=5000",
            "--grpc-http2-min-recv-ping-interval-without-data=5000",
            f"--backend-config=python,shm-region-prefix-name={self._region}",
            # Triton 24.10 forwards no header of /generate.
            f"--grpc-header-forward-pattern={TRACEPARENT}",
            *self._options,
        ]


_LIBC = ctypes.CDLL(None)


def _die_with_parent() -> None:
    """Its stubs then follow the server, and their engines them."""
    _LIBC.prctl(DIE_WITH_PARENT, signal.SIGKILL)


def _say(text: str) -> None:
    print(f"sangam: {text}", file=sys.stderr, flush=True)
