"""Between processes on GPUs of one host that can read each other's memory."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sangam_backend.buffers import to_device
from sangam_backend.kernels.pages import copy_pages
from sangam_backend.processes import Process
from sangam_backend.transport import TransportError
from sangam_backend.transport.host import HostTransport


class CudaIpcTransport(HostTransport):
    """Maps another process's whole pool once; copies pages on a stream beside the engine's."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self._device)

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
            copy_pages(source, read, self._own.pages, written)
            copied: torch.cuda.Event = self._stream.record_event()
        return copied


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
