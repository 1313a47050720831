"""How K/V gets from the pool of one instance into that of another."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from sangam_backend.buffers import to_device
from sangam_backend.handover import Process

Location = dict[str, Any]
"""Where exported pages lie; JSON, and opaque to all but the transport."""


class TransportError(Exception):
    """The K/V cannot be pulled: its owner is gone, has taken the pages back, or has others."""


class Pull(Protocol):
    """A copy under way. Its target pages must stay reserved until `finish` has returned."""

    num_bytes: int

    def is_done(self) -> bool:
        """Never waits."""
        ...

    def finish(self) -> None:
        """Waits for the copy; what is launched afterwards sees the K/V.

        Raises:
            TransportError: the export was released meanwhile, so the pages hold anything.
        """
        ...


class Transport(Protocol):
    """Moves pages between the pools of two processes, by the will of the one that needs them.

    One-sided: the exporter does nothing between `export` and `release`, and a pull that loses the
    race against a release fails instead of giving wrong K/V. A network transport (NIXL, say) has
    to register a whole pool once, to name it in a few hundred bytes of JSON, to read scattered
    pages of it without the exporter's help, and then to read the export's serial number too, in
    this order: what `finish` finds must be as new as the last page. It must fail, not hang, when
    the exporter is gone. One thread calls it.
    """

    def new_pool(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Makes the pool [layers, pages, ...] that exports come from and pulls go to; once."""
        ...

    def export(self, pages: Sequence[int]) -> Location:
        """Offers pages that already hold their K/V, and that stay as they are until released."""
        ...

    def release(self, location: Location) -> None:
        """Takes an export back: from now on its pages may be written, and pulls of it fail."""
        ...

    def pull(self, location: Location, pages: Sequence[int]) -> Pull:
        """Starts to copy exported pages of all layers into pages of the own pool.

        Work launched before may still read those pages: the copy comes after it.

        Raises:
            TransportError: see there; also for a location that no exporter has made.
        """
        ...

    def close(self) -> None:
        """Takes all exports back and lets go of the pools of others."""
        ...


def open_transport(device: torch.device) -> Transport:
    return ShmTransport() if device.type == "cpu" else CudaIpcTransport(device)


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
    """What all transports within one host share: the ledger, and the search for an owner.

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
            slot, serial = _natural(location["slot"]), _natural(location["serial"])
            exported = [_natural(page, source.pages.shape[1]) for page in location["pages"]]
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
        return file, _map_file(Process.current(), file, name, size, dtype)

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
        owner = Process(*map(_natural, description["process"]))
        if not owner.is_running():
            raise TransportError(f"process {owner.pid}, which holds the K/V, has ended")
        shape = [_natural(size) for size in description["shape"]]
        pool = self._own.pages
        there, here = _layout(shape, description["dtype"]), _layout(pool.shape, str(pool.dtype))
        if there != here:
            raise TransportError(f"the K/V has the layout {there}, the pool here {here}")
        serials = _map_file(owner, _natural(ledger_file), name, shape[1], torch.int64)
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


class ShmTransport(HostTransport):
    """Between processes on CPUs, with the pools in shared memory. Pulls are over at once."""

    def _allocate(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
        name = secrets.token_hex(8)
        file, pool = self._new_file(name, math.prod(shape), dtype)
        return pool.view(*shape), {"file": file, "name": name}

    def _map(self, owner: Process, memory: dict[str, Any], shape: Sequence[int]) -> Tensor:
        dtype = self._own.pages.dtype
        file, name = _natural(memory["file"]), memory["name"]
        return _map_file(owner, file, name, math.prod(shape), dtype).view(*shape)

    def _copy(
        self, source: Tensor, source_pages: Sequence[int], target_pages: Sequence[int]
    ) -> None:
        read, written = torch.tensor(source_pages), torch.tensor(target_pages)
        for source_layer, target_layer in zip(source, self._own.pages):
            target_layer[written] = source_layer[read]


class CudaIpcTransport(HostTransport):
    """Between processes on GPUs of one host that can read each other's memory."""

    def __init__(self, device: torch.device) -> None:
        from sangam_backend.kernels.pages import copy_pages

        super().__init__()
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device)
        self._copy_pages = copy_pages

    def new_pool(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Transport.new_pool`; compiles the copy, which no request should wait for."""
        pool = super().new_pool(shape, dtype)
        self._copy(pool, [0], [0])
        return pool

    def close(self) -> None:
        """See `Transport.close`."""
        self._stream.synchronize()
        super().close()

    def _allocate(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
        pool = torch.empty(*shape, dtype=dtype, device=self._device)
        # What torch.multiprocessing sends for a tensor: the IPC handle of the allocation, the
        # place in it, and a counter of users. The event, of work before this moment, is left out:
        # an export comes after its K/V.
        _, handle, _, offset, counter, counter_offset, _, _ = pool.untyped_storage()._share_cuda_()
        return pool, {
            "gpu": _uuid(self._device.index),
            "handle": base64.b64encode(handle).decode(),
            "offset": offset,
            "counter": base64.b64encode(counter).decode(),
            "counter_offset": counter_offset,
        }

    def _map(self, owner: Process, memory: dict[str, Any], shape: Sequence[int]) -> Tensor:
        self._check_access(memory["gpu"])
        dtype = self._own.pages.dtype
        # Opened for the own device, wherever the memory lies: its kernels are what reads it, and
        # the other GPU needs no context of this process.
        storage = torch.UntypedStorage._new_shared_cuda(
            self._device.index,
            base64.b64decode(memory["handle"]),
            math.prod(shape) * dtype.itemsize,
            memory["offset"],
            base64.b64decode(memory["counter"]),
            memory["counter_offset"],
            b"",
            False,
        )
        return torch.empty(0, dtype=dtype, device=self._device).set_(storage).view(*shape)

    def _check_access(self, uuid: str) -> None:
        gpus = {_uuid(index): index for index in range(torch.cuda.device_count())}
        if uuid not in gpus:
            raise TransportError(f"GPU {uuid}, which holds the K/V, is not visible here")
        own, other = self._device.index, gpus[uuid]
        if own != other and not torch.cuda.can_device_access_peer(own, other):
            raise TransportError(f"GPU {own} cannot read the K/V in the memory of GPU {other}")

    def _copy(
        self, source: Tensor, source_pages: Sequence[int], target_pages: Sequence[int]
    ) -> torch.cuda.Event:
        if source.device != self._device:
            raise TransportError("two GPUs of one process do not share K/V")
        # An iteration that still runs may read the target pages for their last owner.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            indices = np.array([source_pages, target_pages], dtype=np.int32)
            read, written = to_device(indices, self._device)
            self._copy_pages(source, read, self._own.pages, written)
            copied: torch.cuda.Event = self._stream.record_event()
        return copied


@contextmanager
def _doubting() -> Iterator[None]:
    """Around all that believes a location."""
    try:
        yield
    except (ArithmeticError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise TransportError(f"the location of the K/V is of no use: {error!r}") from error


def _natural(value: Any, end: int = 1 << 62) -> int:
    if not isinstance(value, int) or not 0 <= value < end:
        raise ValueError(f"{value!r} is not a number below {end}")
    return value


def _layout(shape: Sequence[int], dtype: str) -> str:
    return f"{shape[0]} layers, pages of {tuple(shape[2:])}, {dtype}"


def _digest(description: dict[str, Any]) -> str:
    text = json.dumps(description, sort_keys=True)
    return "sangam-" + hashlib.sha256(text.encode()).hexdigest()


def _map_file(owner: Process, file: int, name: str, size: int, dtype: torch.dtype) -> Tensor:
    """The memory behind a file descriptor of another process."""
    path = f"/proc/{owner.pid}/fd/{file}"
    found = os.readlink(path), os.stat(path).st_size
    if found != (f"/memfd:{name} (deleted)", size * dtype.itemsize):
        raise TransportError(f"process {owner.pid} does not hold the K/V")
    return torch.from_file(path, shared=True, size=size, dtype=dtype)


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
