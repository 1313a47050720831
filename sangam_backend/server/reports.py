"""Reports between the prefill instance that owns a request and the decode instances it uses."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

Report = dict[str, Any]
"""Its `kind`, the `ids` of handovers, the address it comes `from`, and what the kind needs."""

LINGER_MS = 1000


class ReportReceiver:
    """Listens on a socket of its own, and calls back in a thread of its own."""

    def __init__(self, directory: Path, name: str, receive: Callable[[Report], None]) -> None:
        self.address = f"ipc://{directory / name}"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.bind(self.address)
        self._receive = receive
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reports", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._socket.close()
        self._context.term()

    def _run(self) -> None:
        while not self._stopping.is_set():
            if self._socket.poll(100):
                self._receive(json.loads(self._socket.recv()))


class ReportSender:
    """Sends from any thread, and never waits: reports to a process that is gone are dropped."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._lock = threading.Lock()

    def send(self, address: str, report: Report) -> None:
        with self._lock, contextlib.suppress(zmq.Again):
            self._socket(address).send(json.dumps(report).encode(), zmq.NOBLOCK)

    def close(self) -> None:
        with self._lock:
            for socket in self._sockets.values():
                socket.close(LINGER_MS)
            self._context.term()

    def _socket(self, address: str) -> zmq.Socket[bytes]:
        if address not in self._sockets:
            self._sockets[address] = self._context.socket(zmq.PUSH)
            self._sockets[address].connect(address)
        return self._sockets[address]
