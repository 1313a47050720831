"""Two servers behind one client, restarted one after the other while requests run."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from sangam_client import Client, SangamError
from sangam_client.wire import join
from server.conftest import Oracle
from server.harness import START_SECONDS, Serving, launched, serving, wait_for

from sangam_backend.background import free_ports
from sangam_backend.prompt import Prompt

CLIENTS = 2
LONG: dict[str, Any] = {
    "unmasking": "quota",
    "ignore_eos": True,
    "max_tokens": 64,
    "temperature": 1.0,
}
KINDS = [([72, 101, 108 + seed], LONG | {"seed": seed}) for seed in range(7)]


class Load:
    """Threads that ask without a pause, each request once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._numbers = count()
        self._over = threading.Event()
        self.answers: dict[int, list[int]] = {}
        """Token ids by the number of the request."""

    @contextmanager
    def running(self) -> Iterator[None]:
        with ThreadPoolExecutor(CLIENTS) as pool:
            threads = [pool.submit(self._ask) for _ in range(CLIENTS)]
            try:
                yield
            finally:
                self._over.set()
        for thread in threads:
            thread.result()

    def _ask(self) -> None:
        while not self._over.is_set():
            number = next(self._numbers)
            prompt, sampling = KINDS[number % len(KINDS)]
            if number % 2:
                done = self._client.generate(prompt, **sampling)
            else:
                done = join(self._client.stream(prompt, **sampling))
            self.answers[number] = done.output_ids


def serves(server: Serving) -> bool:
    with contextlib.suppress(OSError):
        return server.gauges().get("sangam_requests_total", 0) > CLIENTS
    return False


def stop(server: Serving) -> None:
    server.process.terminate()
    assert server.process.wait(60) == 0, server.log.read_text()


def test_no_request_is_lost_while_two_servers_restart(tmp_path: Path, oracle: Oracle) -> None:
    ports = free_ports(6)
    with ExitStack() as started:
        first, second = (
            started.enter_context(launched(tmp_path / f"log{part[0]}", ports=part))
            for part in (ports[:3], ports[3:])
        )
        client = started.enter_context(Client([first.grpc_url, second.grpc_url], retry_seconds=60))
        # Whoever asks first waits until a server is up.
        load = Load(client)
        with load.running():
            wait_for(lambda: serves(first) and serves(second), START_SECONDS)
            stop(first)
            again = started.enter_context(serving(tmp_path / "log", ports=first.ports))
            wait_for(lambda: serves(again), START_SECONDS)
            stop(second)
            before = len(load.answers)
            wait_for(lambda: len(load.answers) > before + CLIENTS, START_SECONDS)
    assert sorted(load.answers) == list(range(len(load.answers)))
    right = [oracle.answer(Prompt(input_ids=ids), sampling).ids for ids, sampling in KINDS]
    for number, ids in load.answers.items():
        assert ids == right[number % len(right)]


def test_what_no_server_takes_is_an_error_in_time() -> None:
    urls = [f"127.0.0.1:{port}" for port in free_ports(2)]
    with Client(urls, retry_seconds=0.5) as client:
        start = time.monotonic()
        with pytest.raises(SangamError, match=r"^UNAVAILABLE: "):
            client.generate("x")
        assert 0.3 < time.monotonic() - start < 10
        with pytest.raises(SangamError, match="timed out"):
            client.generate("x", timeout=0)
