"""How K/V gets from the pool of one instance into that of another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

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
    """The one between instances on this kind of device."""
    if device.type == "cpu":
        from sangam_backend.transport.shm import ShmTransport

        return ShmTransport()
    from sangam_backend.transport.cuda_ipc import CudaIpcTransport

    return CudaIpcTransport(device)
