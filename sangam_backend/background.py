"""A server in the background of a script: started, waited for, and stopped at the end."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from sangam_client import Client

from sangam_backend.scrape import read_metrics

STOP_SECONDS = 60.0


class BackgroundServer(NamedTuple):
    url: str
    """The address of its gRPC endpoint."""
    metrics_url: str
    process: subprocess.Popen[bytes]
    """Its `returncode` is set when the server has stopped."""

    def metrics(self) -> dict[str, float]:
        """See `sum_metrics`."""
        return read_metrics(self.metrics_url)


@contextmanager
def background_server(
    options: Sequence[str], log: Path, startup_timeout: float
) -> Iterator[BackgroundServer]:
    """Runs `sangam serve` with these options on free ports.

    Raises:
        SystemExit: the server did not start; the message has the end of its log.
    """
    http, grpc, metrics = free_ports(3)
    command = [sys.executable, "-m", "sangam_backend.cli", "serve", *options]
    command += [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    metrics_url = f"http://127.0.0.1:{metrics}/metrics"
    server = BackgroundServer(f"127.0.0.1:{grpc}", metrics_url, process)
    try:
        _wait_until_ready(server, log, startup_timeout)
        yield server
    finally:
        process.terminate()
        process.wait(STOP_SECONDS)


def _wait_until_ready(server: BackgroundServer, log: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    with Client(server.url) as client:
        while not client.is_ready():
            if server.process.poll() is not None:
                sys.exit(f"the server did not start:\n{log.read_text()[-2000:]}")
            if time.monotonic() > deadline:
                sys.exit(f"the server was not ready after {timeout:g} s, see {log}")
            time.sleep(0.1)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        taken = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [int(each.getsockname()[1]) for each in taken]
