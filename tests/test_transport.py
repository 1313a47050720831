"""Pages pulled from another process, which may take them back or die."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from sangam_backend.config import ConfigError
from sangam_backend.transport import Location, Transport, TransportError, open_transport

SHAPE = (3, 8, 2, 16, 2, 4)
CPU = torch.device("cpu")


def fill(pool: Tensor, seed: int) -> None:
    pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(seed)))


def export_and_obey(pages: list[int], pipe: Connection) -> None:
    """The other process: exports pages, and releases them when told."""
    transport = open_transport(CPU)
    fill(transport.new_pool(SHAPE, torch.float32), seed=1)
    location = transport.export(pages)
    pipe.send(location)
    while pipe.recv() == "release":
        transport.release(location)
        pipe.send(None)


@contextmanager
def exporter(pages: list[int]) -> Iterator[tuple[Location, Connection, Any]]:
    ours, theirs = multiprocessing.Pipe()
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=export_and_obey, args=(pages, theirs))
    process.start()
    try:
        yield ours.recv(), ours, process
    finally:
        process.kill()
        process.join()


def new_puller(num_pages: int = 12) -> tuple[Transport, Tensor]:
    transport = open_transport(CPU)
    pool = transport.new_pool((SHAPE[0], num_pages, *SHAPE[2:]), torch.float32)
    fill(pool, seed=2)
    return transport, pool


def test_pulls_the_pages_and_nothing_else() -> None:
    source, before = torch.empty(SHAPE), torch.empty(3, 12, *SHAPE[2:])
    fill(source, seed=1)
    fill(before, seed=2)
    transport, pool = new_puller()
    with exporter([5, 0, 7]) as (location, _, _):
        pull = transport.pull(location, [2, 11, 4])
        assert pull.is_done()
        pull.finish()
    assert pull.num_bytes == 3 * source[:, 0].nbytes
    assert torch.equal(pool[:, [2, 11, 4]], source[:, [5, 0, 7]])
    others = [page for page in range(12) if page not in (2, 11, 4)]
    assert torch.equal(pool[:, others], before[:, others])
    transport.close()


def test_what_was_taken_back_cannot_be_used() -> None:
    transport, _ = new_puller()
    with exporter([1]) as (location, pipe, _):
        pull = transport.pull(location, [0])
        pipe.send("release")
        pipe.recv()
        with pytest.raises(TransportError, match="taken back"):
            pull.finish()
        with pytest.raises(TransportError, match="taken back"):
            transport.pull(location, [0])


def test_a_dead_owner_leaves_nothing_open() -> None:
    files = []
    for _ in range(3):
        pull_from_a_dead_owner()
        gc.collect()
        files.append(len(os.listdir("/proc/self/fd")))
    assert files[2] == files[1]


def pull_from_a_dead_owner() -> None:
    transport, _ = new_puller()
    with exporter([1]) as (location, _, process):
        transport.pull(location, [0]).finish()
        process.kill()
        process.join()
        for _ in range(2):
            with pytest.raises(TransportError, match="has ended"):
                transport.pull(location, [0])
    transport.close()


def test_another_layout() -> None:
    transport = open_transport(CPU)
    transport.new_pool((3, 8, 2, 16, 4, 4), torch.float32)
    with exporter([1]) as (location, _, _), pytest.raises(TransportError, match="layout"):
        transport.pull(location, [0])


def test_slots_of_the_ledger_are_used_again() -> None:
    transport, _ = new_puller()
    for _ in range(10_000):
        location = transport.export([1])
        transport.release(location)
        transport.release(location)
    kept = transport.export([1])
    transport.pull(kept, [0]).finish()
    with pytest.raises(TransportError):
        transport.pull(location, [0])


def test_other_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="on a CPU only"):
        open_transport(torch.device("cuda"))
