"""`sangam serve`: checks everything, prepares Triton's directories, and runs the server."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import socket
from collections.abc import Iterator, Sequence
from types import FrameType

import numpy as np

from sangam_backend.config import ConfigError, EngineConfig
from sangam_backend.deployment import Deployment, check_deployment, write_repository
from sangam_backend.installation import find_triton
from sangam_backend.leftovers import claimed_name, directory_of, sweep
from sangam_backend.models import check_checkpoint
from sangam_backend.supervisor import MODEL_NAME, Endpoints, Server


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


@contextlib.contextmanager
def stop_signals(server: Server) -> Iterator[None]:
    """SIGINT and SIGTERM stop the server; a second one ends it at once."""

    def handle(_signal: int, _frame: FrameType | None) -> None:
        if server.stopping:
            server.grace = 0
            server.send_signal(signal.SIGKILL)
        server.stopping = True

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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


def describe(endpoints: Endpoints) -> str:
    host = endpoints.reachable_host
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
