"""What all transports within one host share."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from sangam_backend.processes import Process
from sangam_backend.transport import Location, Pull, TransportError


class Ledger:
    """Serial numbers of exports in shared memory; an export is valid while its number stands.

    Readers look before and after a copy, as with a seqlock. No number is used twice, and numpy
    writes each at once.
    """

    def __init__(self, serials: Tensor) -> None:
        self._serials = serials.numpy()
        self._free = list(range(len(serials)))
        self._last = 0

    def enter(self) -> tuple[int, int]:
        """A slot, and the serial number now in it."""
        if not self._free:
            raise RuntimeError(f"all {len(self._serials)} exports of the pool are in use")
        slot = self._free.pop()
        self._last += 1
        self._serials[slot] = self._last
        return slot, self._last

    def strike(self, slot: int, serial: int) -> None:
        if self._serials[slot] == serial:
            self._serials[slot] = 0
            self._free.append(slot)

    def strike_all(self) -> None:
        self._serials[:] = 0

    def check(self, slot: int, serial: int) -> None:
        """Raises TransportError for what has been struck, or never was entered."""
        if not slot < len(self._serials) or serial == 0 or self._serials[slot] != serial:
            raise TransportError("the K/V has been taken back by its owner")


@dataclass(eq=False)
class SharedPool:
    """A pool that this process can read, whoever owns it."""

    owner: Process
    ledger: Ledger
    pages: Tensor


_own_pools: WeakValueDictionary[str, SharedPool] = WeakValueDictionary()
"""Of all transports in this process, since CUDA opens no handle where it was made."""


class HostTransport(ABC):
    """The ledger, and the search for the owner of exported pages.

    The ledger lies in memory that has no name in any directory and vanishes with its owner. Others
    open it through /proc/<pid>/fd, which the kernel allows to the same user only. There it shows a
    digest of all that a location says of a pool, so nothing forged or outdated is believed.
    """

    def __init__(self) -> None:
        self._files: list[int] = []
        self._opened: dict[str, SharedPool] = {}

    def new_pool(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Transport.new_pool`."""
        owner = Process.current()
        pool, memory = self._allocate(shape, dtype)
        self._description = {
            "process": [owner.pid, owner.started],
            "id": secrets.token_hex(8),
            "shape": list(shape),
            "dtype": str(dtype),
            "memory": memory,
        }
        name = _digest(self._description)
        # An export has a page at least.
        self._ledger_file, serials = self._new_file(name, shape[1], torch.int64)
        self._own = _own_pools[name] = SharedPool(owner, Ledger(serials), pool)
        return pool

    def export(self, pages: Sequence[int]) -> Location:
        """See `Transport.export`."""
        slot, serial = self._own.ledger.enter()
        return {
            "pool": self._description,
            "ledger": self._ledger_file,
            "slot": slot,
            "serial": serial,
            "pages": list(pages),
        }

    def release(self, location: Location) -> None:
        """See `Transport.release`."""
        self._own.ledger.strike(location["slot"], location["serial"])

    def pull(self, location: Location, pages: Sequence[int]) -> Pull:
        """See `Transport.pull`."""
        with _doubting():
            source = self._find(location)
            slot, serial = natural(location["slot"]), natural(location["serial"])
            exported = [natural(page, source.pages.shape[1]) for page in location["pages"]]
        if len(exported) != len(pages):
            raise TransportError(f"{len(exported)} pages are exported, {len(pages)} were expected")
        source.ledger.check(slot, serial)
        copied = self._copy(source.pages, exported, pages)
        num_bytes = len(pages) * self._own.pages[:, 0].nbytes
        return _HostPull(num_bytes, source, slot, serial, copied)

    def close(self) -> None:
        """See `Transport.close`."""
        if self._files:
            self._own.ledger.strike_all()
        self._opened.clear()
        while self._files:
            os.close(self._files.pop())

    @abstractmethod
    def _allocate(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
        """A pool, and how others find its memory."""

    @abstractmethod
    def _map(self, owner: Process, memory: dict[str, Any], shape: Sequence[int]) -> Tensor:
        """The pool of another process; of the dtype of the own one."""

    @abstractmethod
    def _copy(
        self, source: Tensor, source_pages: Sequence[int], target_pages: Sequence[int]
    ) -> torch.cuda.Event | None:
        """Returns the end of the copy, if that is still to come."""

    def _new_file(self, name: str, size: int, dtype: torch.dtype) -> tuple[int, Tensor]:
        file = os.memfd_create(name)
        self._files.append(file)
        os.ftruncate(file, size * dtype.itemsize)
        return file, map_file(Process.current(), file, name, size, dtype)

    def _find(self, location: Location) -> SharedPool:
        opened = self._opened
        # A mapping would keep the memory of a dead process from being freed.
        for name in [name for name, source in opened.items() if not source.owner.is_running()]:
            del opened[name]
        name = _digest(location["pool"])
        source = _own_pools.get(name) or opened.get(name)
        if source is None:
            source = opened[name] = self._open(name, location["pool"], location["ledger"])
        return source

    def _open(self, name: str, description: dict[str, Any], ledger_file: int) -> SharedPool:
        owner = Process(*map(natural, description["process"]))
        if not owner.is_running():
            raise TransportError(f"process {owner.pid}, which holds the K/V, has ended")
        shape = [natural(size) for size in description["shape"]]
        pool = self._own.pages
        there, here = _layout(shape, description["dtype"]), _layout(pool.shape, str(pool.dtype))
        if there != here:
            raise TransportError(f"the K/V has the layout {there}, the pool here {here}")
        serials = map_file(owner, natural(ledger_file), name, shape[1], torch.int64)
        return SharedPool(owner, Ledger(serials), self._map(owner, description["memory"], shape))


@dataclass(eq=False)
class _HostPull:
    num_bytes: int
    source: SharedPool
    """Stays mapped as long as this refers to it."""
    slot: int
    serial: int
    copied: torch.cuda.Event | None

    def is_done(self) -> bool:
        return self.copied is None or self.copied.query()

    def finish(self) -> None:
        if self.copied is not None:
            self.copied.synchronize()
        self.source.ledger.check(self.slot, self.serial)


@contextmanager
def _doubting() -> Iterator[None]:
    """Around all that believes a location."""
    try:
        yield
    except (ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise TransportError(f"the location of the K/V is of no use: {error!r}") from error


def natural(value: Any, end: int = 1 << 62) -> int:
    if not isinstance(value, int) or not 0 <= value < end:
        raise ValueError(f"{value!r} is not a number below {end}")
    return value


def _layout(shape: Sequence[int], dtype: str) -> str:
    return f"{shape[0]} layers, pages of {tuple(shape[2:])}, {dtype}"


def _digest(description: dict[str, Any]) -> str:
    text = json.dumps(description, sort_keys=True)
    return "sangam-" + hashlib.sha256(text.encode()).hexdigest()


def map_file(owner: Process, file: int, name: str, size: int, dtype: torch.dtype) -> Tensor:
    """The memory behind a file descriptor of another process."""
    path = f"/proc/{owner.pid}/fd/{file}"
    found = os.readlink(path), os.stat(path).st_size
    if found != (f"/memfd:{name} (deleted)", size * dtype.itemsize):
        raise TransportError(f"process {owner.pid} does not hold the K/V")
    return torch.from_file(path, shared=True, size=size, dtype=dtype)
