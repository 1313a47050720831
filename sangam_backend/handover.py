"""What a prefill instance tells a decode instance about a block, and how both know each other.

Both are processes of one server. A handover passes through Triton, whose models any client may
call, so it is signed with a key that lies, like the instances' sockets, in a directory of the
server's own.
"""

from __future__ import annotations

import dataclasses
import hmac
import json
import os
import secrets
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sangam_backend.processes import Process
from sangam_backend.request import ErrorCode, RequestError, SamplingParams
from sangam_backend.rules import Confidence, Unmasking

KEY_BYTES = 32
KEY_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Handover:
    """A request at the start of one of its blocks."""

    id: str
    guard: bool
    """Asks only to hold the step open while the owner lives."""
    owner: Process
    """The prefill instance, which waits for reports at `reply_to`."""
    reply_to: str
    request_id: str
    trace_id: str
    arrival: float
    """On the clock that all processes of a host share (time.monotonic)."""
    prompt: list[int]
    params: SamplingParams
    canvas: list[int]
    """Tokens of the blocks before."""
    num_forwards: int
    """That they took."""
    prefill_follows: bool
    """Whether the owner runs the prefill and will report it, else the decode instance has to."""
    deadline: float | None
    options: dict[str, Any]
    """How the client wants to be answered."""

    def to_bytes(self, key: bytes) -> bytes:
        values = dataclasses.asdict(self)
        values["params"] |= {
            "unmasking": self.params.unmasking.value,
            "confidence": self.params.confidence.value,
        }
        body = json.dumps(values).encode()
        return _sign(body, key) + body

    @classmethod
    def from_bytes(cls, data: bytes, key: bytes) -> Handover:
        """Raises RequestError for what no prefill instance of this server has made."""
        size = len(_sign(b"", key))
        if not hmac.compare_digest(data[:size], _sign(data[size:], key)):
            raise RequestError(
                ErrorCode.INVALID_ARG, "handover was not made by a prefill instance of this server"
            )
        values = json.loads(data[size:])
        params = values["params"] | {
            "unmasking": Unmasking(values["params"]["unmasking"]),
            "confidence": Confidence(values["params"]["confidence"]),
            "stop": tuple(values["params"]["stop"]),
        }
        values |= {"owner": Process(**values["owner"]), "params": SamplingParams(**params)}
        return cls(**values)


def meeting_path(server: int) -> Path:
    """Where the meeting place of a server, a process id, is or would be."""
    return Path(tempfile.gettempdir()) / f"sangam-{os.getuid()}" / str(server)


def meeting_place(server: int) -> Path:
    """Makes the directory where the instances of a server find each other.

    Raises:
        PermissionError: it belongs to somebody else.
    """
    directory = meeting_path(server)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in (directory.parent, directory):
        if not is_own(path):
            raise PermissionError(f"{path} belongs to somebody else")
        path.chmod(0o700)
    return directory


def is_own(path: Path) -> bool:
    """Whether this user made it; of a link it is the link that counts."""
    return path.lstat().st_uid == os.getuid()


def shared_key(directory: Path) -> bytes:
    """The key of a server; the first instance to ask makes it."""
    path = directory / "key"
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        return _read_key(path)
    key = secrets.token_bytes(KEY_BYTES)
    with os.fdopen(descriptor, "wb") as file:
        file.write(key)
    return key


def _read_key(path: Path) -> bytes:
    deadline = time.monotonic() + KEY_SECONDS
    while len(key := path.read_bytes()) < KEY_BYTES:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} has been left unfinished")
        time.sleep(0.01)
    return key


def _sign(body: bytes, key: bytes) -> bytes:
    return hmac.digest(key, body, "sha256")
