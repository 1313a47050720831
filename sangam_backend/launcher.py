"""`sangam serve`: prepares Triton's directories, starts tritonserver, and ends it cleanly."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import http.client
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig as TritonModelConfig

from sangam_backend.config import ConfigError, EngineConfig
from sangam_backend.device import pick_device
from sangam_backend.handover import meeting_path
from sangam_backend.leftovers import claimed_name, directory_of, make_private, sweep
from sangam_backend.models import check_checkpoint
from sangam_backend.trace_context import TRACEPARENT
from sangam_backend.watch import FROZEN_SECONDS, Watch

MODEL_NAME = "sangam"
REPOSITORY = Path(__file__).parent / "model_repository"
RESTRICTED = "model-repository,shared-memory,logging,trace"
GONE = "UNAVAILABLE"
HELD_REQUESTS = re.compile(r"(?m)^sangam_requests_(?:waiting|decoding|handed_over)\{.*\} (\S+)$")
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


class Triton(NamedTuple):
    """Where the server is and what it needs."""

    executable: Path
    backends: Path
    library_path: str


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


def serve(
    config: EngineConfig,
    endpoints: Endpoints,
    deployment: Deployment,
    startup_timeout: float,
    grace: float,
    triton_options: Sequence[str],
) -> int:
    """Runs a server until SIGINT or SIGTERM, or until it ends by itself.

    Args:
        triton_options: Of tritonserver, after those that it always gets.

    Returns:
        The exit status of the command: 0 after a signal.

    Raises:
        ConfigError: what is wrong with the checkpoint, the ports or the installation.
    """
    check_deployment(deployment, config)
    if int(np.__version__.split(".")[0]) >= 2:
        raise ConfigError(f"NumPy is {np.__version__}, the Triton server needs a version below 2")
    directory = check_checkpoint(config)
    check_ports(endpoints)
    sweep()
    with claimed_name() as name:
        work = directory_of(name)
        triton = find_triton(work)
        repository = work / "models"
        write_repository(repository, deployment, dataclasses.replace(config, model=str(directory)))
        server = Server(triton, repository, endpoints, startup_timeout, grace, name, triton_options)
        with stop_signals(server), server:
            if not server.wait_until_ready():
                return server.failed_start()
            print(describe(endpoints), flush=True)
            return server.wait()


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
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LEAVE_SECONDS)
        self._kill()

    def _kill(self) -> None:
        # Whatever is left holds memory.
        self._signal(signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(meeting_path(self.process.pid), ignore_errors=True)

    def _signal(self, number: signal.Signals) -> None:
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
        held = HELD_REQUESTS.findall(self._metrics())
        return bool(held) and not any(map(float, held))

    def _metrics(self) -> str:
        return self._http(self.endpoints.metrics_port, "GET", "/metrics")[1].decode()

    def _call(self, path: str) -> bytes:
        """Posts to an administrative endpoint."""
        return self._http(self.endpoints.http_port, "POST", path)[1]

    def _http(
        self, port: int, method: str, path: str, timeout: float = CALL_SECONDS
    ) -> tuple[int, bytes]:
        """Status and body; 0 when the server does not answer."""
        host, key = _reachable(self.endpoints.host), {"sangam-admin-key": self._key}
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


@contextlib.contextmanager
def stop_signals(server: Server) -> Iterator[None]:
    """SIGINT and SIGTERM stop the server; a second one ends it at once."""

    def handle(_signal: int, _frame: FrameType | None) -> None:
        if server.stopping:
            server.grace = 0
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.process.pid, signal.SIGKILL)
        server.stopping = True

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


_LIBC = ctypes.CDLL(None)


def _die_with_parent() -> None:
    """Its stubs then follow the server, and their engines them."""
    _LIBC.prctl(DIE_WITH_PARENT, signal.SIGKILL)


def find_triton(work: Path) -> Triton:
    """Finds a server: named by the environment, on PATH, or of the nvidia-pytriton wheel.

    Args:
        work: Where a backend directory may be made.

    Raises:
        ConfigError: there is none, or it lacks a library.
    """
    if executable := os.environ.get("SANGAM_TRITONSERVER"):
        backends = os.environ.get("SANGAM_BACKEND_DIRECTORY", "/opt/tritonserver/backends")
        libraries = os.environ.get("SANGAM_TRITON_LIBS", os.environ.get("LD_LIBRARY_PATH", ""))
        found = Triton(Path(executable), Path(backends), libraries)
    elif on_path := shutil.which("tritonserver"):
        root = Path(on_path).resolve().parent.parent
        found = Triton(Path(on_path), root / "backends", os.environ.get("LD_LIBRARY_PATH", ""))
    else:
        found = _wheel_triton(work)
    for path in (found.executable, found.backends / "python"):
        if not path.exists():
            raise ConfigError(f"{path}: no such file, but the Triton server needs it")
    return found


def _wheel_triton(work: Path) -> Triton:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "no Triton server: set SANGAM_TRITONSERVER, put tritonserver on PATH, "
            "or pip install 'sangam[server]'"
        )
    package = Path(spec.origin).parent
    version = "{}.{}".format(*sys.version_info)
    stub = package / "tritonserver/python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        raise ConfigError(f"nvidia-pytriton has no Python backend for Python {version}")
    backends = work / "backends"
    shutil.copytree(package / "tritonserver/backends/python", backends / "python")
    shutil.copy(stub, backends / "python")
    libraries = [str(package.parent / "nvidia_pytriton.libs"), str(_libpython_directory())]
    executable = package / "tritonserver/bin/tritonserver"
    return Triton(executable, backends, os.pathsep.join(libraries))


def _libpython_directory() -> Path:
    """The stub embeds Python, so it needs this Python's shared library."""
    directory = Path(sysconfig.get_config_var("LIBDIR") or "")
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    if not (directory / name).exists():
        raise ConfigError(
            f"{directory / name}: no such file; the Triton Python backend needs a Python built "
            "with --enable-shared (Debian: the package libpython3.N)"
        )
    return directory


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


def check_ports(endpoints: Endpoints) -> None:
    """Raises ConfigError for a port that cannot be listened on, or that is given twice."""
    with contextlib.ExitStack() as probes:
        for name in ("http_port", "grpc_port", "metrics_port"):
            port = getattr(endpoints, name)
            if not 1 <= port <= 65535:
                raise ConfigError(f"{name} is {port}, must be from 1 to 65535")
            probe = probes.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((endpoints.host, port))
                probe.listen()
            except OSError as error:
                raise ConfigError(
                    f"{name} {port}: cannot listen on {endpoints.host}: {error}"
                ) from None


def _say(text: str) -> None:
    print(f"sangam: {text}", file=sys.stderr, flush=True)


def describe(endpoints: Endpoints) -> str:
    host = _reachable(endpoints.host)
    return f"""
Sangam is ready (model {MODEL_NAME}).
  gRPC     {host}:{endpoints.grpc_port}
  HTTP     http://{host}:{endpoints.http_port}
  metrics  http://{host}:{endpoints.metrics_port}/metrics

Try it:
  sangam-client --url {host}:{endpoints.grpc_port} --chat --stream "Add 4363 and 75."
  curl -N http://{host}:{endpoints.http_port}/v2/models/{MODEL_NAME}/generate_stream -d \\
    '{{"text_input": "Hello", "stream": true, "max_tokens": 64}}'
"""


def _reachable(host: str) -> str:
    return "127.0.0.1" if host == "0.0.0.0" else host
