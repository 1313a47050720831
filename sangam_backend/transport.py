"""How K/V gets from the pool of one instance into that of another."""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sangam_backend.config import ConfigError
from sangam_backend.handover import Process

Location = dict[str, Any]
"""Where exported pages lie; JSON, and opaque to all but the transport."""

LEDGER_SLOTS = 4096
SERIAL = struct.Struct("<Q")


class TransportError(Exception):
    """The K/V cannot be pulled: its owner is gone, has taken the pages back, or has others."""


class Pull(Protocol):
    """A copy under way."""

    num_bytes: int

    def is_done(self) -> bool:
        """Never waits."""
        ...

    def finish(self) -> None:
        """Waits for the copy. Raises TransportError if the export was released meanwhile."""
        ...


class Transport(Protocol):
    """Moves pages between the pools of two processes, by the will of the one that needs them.

    One-sided: the exporter does nothing between `export` and `release`, and a pull that loses the
    race against a release fails instead of giving wrong K/V. A network transport (NIXL, say) fits
    if it can register a whole pool once, name it in a few hundred bytes, read scattered pages of
    it without the exporter's help, and tell whether an export was still valid after the read.
    """

    def new_pool(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Makes the pool [layers, pages, ...] that exports come from and pulls go to; once."""
        ...

    def export(self, pages: Sequence[int]) -> Location:
        """Offers pages, which must stay as they are until they are released."""
        ...

    def release(self, location: Location) -> None:
        """Takes an export back: its pages may be written again."""
        ...

    def pull(self, location: Location, pages: Sequence[int]) -> Pull:
        """Starts to copy exported pages of all layers into pages of the own pool.

        Raises:
            TransportError: see there.
        """
        ...

    def close(self) -> None: ...


class Ledger:
    """Serial numbers of exports in shared memory; an export is valid while its number stands."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._free = list(range(LEDGER_SLOTS))
        self._last = 0

    def enter(self) -> tuple[int, int]:
        """A slot, and the serial number now in it."""
        slot = self._free.pop()
        self._last += 1
        self._write(slot, self._last)
        return slot, self._last

    def strike(self, slot: int, serial: int) -> None:
        if self.holds(slot, serial):
            self._write(slot, 0)
            self._free.append(slot)

    def holds(self, slot: int, serial: int) -> bool:
        (found,) = SERIAL.unpack_from(self._memory, slot * SERIAL.size)
        return bool(found == serial != 0)

    def _write(self, slot: int, serial: int) -> None:
        SERIAL.pack_into(self._memory, slot * SERIAL.size, serial)


class Owner:
    """Another process's pool and ledger, mapped."""

    def __init__(self, location: Location, pool: Tensor) -> None:
        self.process = Process(*location["process"])
        if not self.process.is_running():
            raise TransportError(f"process {self.process.pid}, which holds the K/V, has ended")
        expected = [pool.shape[0], *pool.shape[2:], str(pool.dtype)]
        layout = [location["shape"][0], *location["shape"][2:], location["dtype"]]
        if layout != expected:
            raise TransportError(f"the K/V has the layout {layout}, the pool here {expected}")
        memory = _map_of(self.process, location["pool"])
        self.pool = torch.frombuffer(memory, dtype=pool.dtype).view(location["shape"])
        self.ledger = Ledger(_map_of(self.process, location["ledger"]))


class ShmTransport:
    """Between processes of one host on CPUs, through memory files that vanish with their owner.

    They have no name; who may look into /proc/<pid>/fd, the same user alone, can open them.
    """

    def __init__(self) -> None:
        self._owners: dict[tuple[int, int], Owner] = {}
        self._ledger_file = _new_file("sangam-ledger", LEDGER_SLOTS * SERIAL.size)
        self._ledger = Ledger(mmap.mmap(self._ledger_file, 0))
        self._process = Process.current()

    def new_pool(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        self._pool_file = _new_file("sangam-kv", size)
        memory = mmap.mmap(self._pool_file, size)
        self.pool = torch.frombuffer(memory, dtype=dtype).view(*shape)
        return self.pool

    def export(self, pages: Sequence[int]) -> Location:
        slot, serial = self._ledger.enter()
        return {
            "process": [self._process.pid, self._process.started],
            "pool": self._pool_file,
            "ledger": self._ledger_file,
            "shape": list(self.pool.shape),
            "dtype": str(self.pool.dtype),
            "pages": list(pages),
            "slot": slot,
            "serial": serial,
        }

    def release(self, location: Location) -> None:
        self._ledger.strike(location["slot"], location["serial"])

    def pull(self, location: Location, pages: Sequence[int]) -> Pull:
        owner = self._owner(location)
        pull = _FinishedPull(owner.ledger, location, len(pages) * self.pool[:, 0].nbytes)
        pull.check()
        for target, source in zip(self.pool, owner.pool):
            target[list(pages)] = source[location["pages"]]
        return pull

    def close(self) -> None:
        self._owners.clear()
        for file in (self._ledger_file, self._pool_file):
            os.close(file)

    def _owner(self, location: Location) -> Owner:
        identity = (*location["process"],)
        owner = self._owners.get(identity)
        if owner is None:
            owner = self._owners[identity] = Owner(location, self.pool)
        elif not owner.process.is_running():
            del self._owners[identity]
            raise TransportError(f"process {owner.process.pid}, which holds the K/V, has ended")
        return owner


class _FinishedPull:
    def __init__(self, ledger: Ledger, location: Location, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._ledger = ledger
        self._entry = location["slot"], location["serial"]

    def is_done(self) -> bool:
        return True

    def finish(self) -> None:
        self.check()

    def check(self) -> None:
        if not self._ledger.holds(*self._entry):
            raise TransportError("the K/V has been taken back by its owner")


def open_transport(device: torch.device) -> Transport:
    """Raises ConfigError where there is none for a device."""
    if device.type != "cpu":
        raise ConfigError(
            f"the roles prefill and decode run on a CPU only so far, not on {device.type}"
        )
    return ShmTransport()


def _new_file(name: str, size: int) -> int:
    descriptor = os.memfd_create(name)
    os.ftruncate(descriptor, size)
    return descriptor


def _map_of(process: Process, descriptor: int) -> mmap.mmap:
    """A memory file of another process."""
    try:
        opened = os.open(f"/proc/{process.pid}/fd/{descriptor}", os.O_RDWR)
    except OSError as error:
        raise TransportError(f"the K/V of process {process.pid} is out of reach: {error}") from None
    try:
        return mmap.mmap(opened, 0)
    finally:
        os.close(opened)
