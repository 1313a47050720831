"""Pages pulled from another process, which may take them back, die, or send rubbish."""

from __future__ import annotations

import copy
import gc
import json
import multiprocessing
import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sangam_backend.processes import Process
from sangam_backend.transport import Location, Transport, TransportError, open_transport

SHAPE = (3, 32, 2, 16, 2, 4)
OWN_SHAPE = (3, 12, 2, 16, 2, 4)


class Setup(NamedTuple):
    """A pool of random bits; the same setup makes the same ones everywhere."""

    shape: Sequence[int]
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0

    def fill(self, pool: Tensor) -> None:
        generator = torch.Generator(self.device).manual_seed(self.seed)
        pool.view(torch.uint8).random_(generator=generator)

    def new_pool(self) -> Tensor:
        pool = torch.empty(*self.shape, dtype=self.dtype, device=self.device)
        self.fill(pool)
        return pool

    def open(self) -> tuple[Transport, Tensor]:
        transport = open_transport(torch.device(self.device))
        pool = transport.new_pool(self.shape, self.dtype)
        self.fill(pool)
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)
        return transport, pool


THERE = Setup(SHAPE, seed=1)
HERE = Setup(OWN_SHAPE, seed=2)


def obey(setup: Setup, pipe: Connection) -> None:
    """The life of the other process."""
    transport, pool = setup.open()
    pipe.send(None)
    while True:
        command, *arguments = pipe.recv()
        result = getattr(transport, command)(*arguments)
        if command == "pull":
            result.finish()
            result = pool[:, arguments[1]].view(torch.uint8).cpu().numpy()
        pipe.send(result)


class Other(NamedTuple):
    process: BaseProcess
    pipe: Connection

    def __call__(self, *command: Any) -> Any:
        self.pipe.send(command)
        return self.pipe.recv()

    def export(self, pages: Sequence[int]) -> Location:
        """As it arrives when it has been sent as JSON."""
        location: Location = json.loads(json.dumps(self("export", pages)))
        return location

    def die(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join()


@contextmanager
def another_process(setup: Setup) -> Iterator[Other]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=obey, args=(setup, theirs))
    process.start()
    theirs.close()
    try:
        ours.recv()
        yield Other(process, ours)
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


@pytest.fixture(scope="module")
def other() -> Iterator[Other]:
    with another_process(THERE) as other:
        yield other


@pytest.fixture
def opened() -> Iterator[tuple[Transport, Tensor]]:
    transport, pool = HERE.open()
    yield transport, pool
    transport.close()


@pytest.fixture
def transport(opened: tuple[Transport, Tensor]) -> Transport:
    return opened[0]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_pulls_the_pages_and_nothing_else(other: Other, opened: tuple[Transport, Tensor]) -> None:
    transport, pool = opened
    source, expected = THERE.new_pool(), HERE.new_pool()
    expected[:, [2, 11, 4]] = source[:, [5, 0, 7]]
    pull = transport.pull(other.export([5, 0, 7]), [2, 11, 4])
    assert pull.is_done()
    pull.finish()
    assert pull.num_bytes == 3 * source[:, 0].nbytes
    assert same_bits(pool, expected)


def test_each_pulls_from_the_other(other: Other, opened: tuple[Transport, Tensor]) -> None:
    transport, pool = opened
    location = transport.export([9, 3])
    there = torch.from_numpy(other("pull", location, [1, 2]))
    assert same_bits(there, pool[:, [9, 3]])
    # Whatever the owner writes later is seen, as the mapping is shared and not copied.
    transport.pull(other.export([1, 2]), [0, 5]).finish()
    assert same_bits(pool[:, [0, 5]], there.view(pool.dtype))


def pull_within_a_process(owner: Setup, reader: Setup) -> tuple[Transport, Transport, Location]:
    """Pulls from a pool into itself and into another; its export stays."""
    first, pool = owner.open()
    second, other_pool = reader.open()
    location = first.export([6, 7])
    first.pull(location, [0, 1]).finish()
    assert same_bits(pool[:, :2], pool[:, [6, 7]])
    second.pull(location, [10, 3]).finish()
    assert same_bits(other_pool[:, [10, 3]], pool[:, [6, 7]])
    return first, second, location


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_within_a_process(dtype: torch.dtype) -> None:
    first, second, location = pull_within_a_process(
        Setup(SHAPE, dtype, seed=1), Setup(OWN_SHAPE, dtype, seed=2)
    )
    first.close()
    with pytest.raises(TransportError, match="taken back"):
        second.pull(location, [10, 3])
    second.close()


def test_what_was_taken_back_is_refused(other: Other, transport: Transport) -> None:
    location = other.export([1])
    pull = transport.pull(location, [0])
    other("release", location)
    with pytest.raises(TransportError, match="taken back"):
        pull.finish()
    with pytest.raises(TransportError, match="taken back"):
        transport.pull(location, [0])


def test_a_new_export_in_the_same_slot_does_not_revive_the_old(
    other: Other, transport: Transport
) -> None:
    old = other.export([1])
    pull = transport.pull(old, [0])
    other("release", old)
    new = other.export([1])
    assert new["slot"] == old["slot"]
    with pytest.raises(TransportError, match="taken back"):
        pull.finish()
    transport.pull(new, [0]).finish()
    other("release", old)
    transport.pull(new, [0]).finish()


def test_an_owner_that_closed_has_taken_all_back(transport: Transport) -> None:
    with another_process(THERE) as other:
        location, unseen = other.export([1]), other.export([2])
        pull = transport.pull(location, [0])
        other("close")
        with pytest.raises(TransportError, match="taken back"):
            pull.finish()
        with pytest.raises(TransportError, match="taken back"):
            transport.pull(unseen, [0])
        newcomer, _ = HERE.open()
        with pytest.raises(TransportError, match="of no use"):
            newcomer.pull(location, [0])
        newcomer.close()


def test_a_killed_owner_leaves_nothing_behind() -> None:
    files = []
    for _ in range(2):
        pull_from_the_dead()
        gc.collect()
        files.append(len(os.listdir("/proc/self/fd")))
    assert files[1] == files[0]
    assert "/memfd:sangam" not in Path("/proc/self/maps").read_text()


def pull_from_the_dead() -> None:
    transport, pool = HERE.open()
    with another_process(THERE) as other:
        location, unseen = other.export([1]), other.export([2])
        pull = transport.pull(location, [0])
        pid = other.process.pid
        other.die()
        # All had been copied, and the page was never taken back.
        pull.finish()
        assert same_bits(pool[:, 0], THERE.new_pool()[:, 1])
        for lost in (location, unseen, location):
            with pytest.raises(TransportError, match="has ended"):
                transport.pull(lost, [0])
    transport.close()
    named = [name for name in os.listdir("/dev/shm") if str(pid) in re.split(r"[_\W]", name)]
    assert not named


def test_a_process_that_inherits_the_number_is_not_the_owner(transport: Transport) -> None:
    other, _ = THERE.open()
    location = copy.deepcopy(other.export([1]))
    location["pool"]["process"][1] += 1
    with pytest.raises(TransportError, match="has ended"):
        transport.pull(location, [0])
    other.close()


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((3, 32, 2, 16, 4, 4), torch.float32), ((4, *SHAPE[1:]), torch.float32), (SHAPE, torch.int32)],
)
def test_another_layout(other: Other, shape: Sequence[int], dtype: torch.dtype) -> None:
    transport, _ = Setup(shape, dtype).open()
    with pytest.raises(TransportError, match="layout") as caught:
        transport.pull(other.export([1]), [0])
    for part in (SHAPE[2:], torch.float32, shape[2:], dtype):
        assert str(part) in str(caught.value)
    transport.close()


def test_another_number_of_pages(other: Other, transport: Transport) -> None:
    with pytest.raises(TransportError, match="2 pages are exported, 1 were expected"):
        transport.pull(other.export([1, 2]), [0])


def test_slots_of_the_ledger_are_used_again(transport: Transport) -> None:
    for _ in range(10 * OWN_SHAPE[1]):
        location = transport.export([1])
        transport.release(location)
        transport.release(location)
    kept = [transport.export([page]) for page in range(OWN_SHAPE[1])]
    with pytest.raises(RuntimeError, match="all 12 exports"):
        transport.export([1])
    for export in kept:
        transport.pull(export, [0]).finish()
    with pytest.raises(TransportError, match="taken back"):
        transport.pull(location, [0])


RUBBISH = [None, "x", "", -1, 1.5, 10**30, 10**5000, [], {}, [[]], float("nan"), [10**9], object()]


def paths(value: Any) -> Iterator[list[Any]]:
    """To everything in it, itself included."""
    yield []
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from ([key, *path] for path in paths(value[key]))


def replaced(value: Any, path: list[Any], new: Any) -> Any:
    if not path:
        return new
    changed = copy.copy(value)
    changed[path[0]] = replaced(value[path[0]], path[1:], new)
    return changed


@pytest.mark.parametrize("known", [True, False])
def test_rubbish(other: Other, transport: Transport, known: bool) -> None:
    location = other.export([1])
    if known:
        transport.pull(location, [0]).finish()
    for path in paths(location):
        if path == ["ledger"] and known:
            continue
        for new in RUBBISH:
            with pytest.raises(TransportError):
                transport.pull(replaced(location, path, new), [0])
        if path and isinstance(path[-1], str):
            without = copy.deepcopy(location)
            holder = without
            for key in path[:-1]:
                holder = holder[key]
            del holder[path[-1]]
            with pytest.raises(TransportError):
                transport.pull(without, [0])
    transport.pull(location, [0]).finish()


def test_files_that_are_no_pool(transport: Transport) -> None:
    """Neither somebody else's process nor a pipe of the own one is opened, which might block."""
    other, _ = THERE.open()
    location = other.export([1])
    reader, writer = os.pipe()
    stat = Path("/proc/1/stat").read_text().rpartition(")")[2].split()
    for process in (Process(1, int(stat[19])), Process.current()):
        for file in (0, reader, writer, location["ledger"], 10**9):
            forged = copy.deepcopy(location)
            forged["pool"]["process"] = [process.pid, process.started]
            forged["pool"]["id"] = "forged"
            forged["ledger"] = file
            with pytest.raises(TransportError):
                transport.pull(forged, [0])
    other.close()
    os.close(reader)
    os.close(writer)
