"""Between processes on CPUs: the pools lie in shared memory."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sangam_backend.processes import Process
from sangam_backend.transport.host import HostTransport, map_file, natural


class ShmTransport(HostTransport):
    """Pulls are over at once."""

    def _allocate(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, dict[str, Any]]:
        name = secrets.token_hex(8)
        file, pool = self._new_file(name, math.prod(shape), dtype)
        return pool.view(*shape), {"file": file, "name": name}

    def _map(self, owner: Process, memory: dict[str, Any], shape: Sequence[int]) -> Tensor:
        dtype = self._own.pages.dtype
        file, name = natural(memory["file"]), memory["name"]
        return map_file(owner, file, name, math.prod(shape), dtype).view(*shape)

    def _copy(
        self, source: Tensor, source_pages: Sequence[int], target_pages: Sequence[int]
    ) -> None:
        read, written = torch.tensor(source_pages), torch.tensor(target_pages)
        for source_layer, target_layer in zip(source, self._own.pages):
            target_layer[written] = source_layer[read]
