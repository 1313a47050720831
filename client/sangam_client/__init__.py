from __future__ import annotations

from sangam_client.aio import AsyncClient
from sangam_client.client import Client
from sangam_client.wire import Chunk, Completion, SangamError

__all__ = ["AsyncClient", "Chunk", "Client", "Completion", "SangamError"]
