"""What a server keeps in files, and how it goes even when the server was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sangam_backend.handover import is_own, meeting_path
from sangam_backend.processes import is_running

SHARED_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def claimed_name() -> Iterator[str]:
    """A name for a server's shared memory and its directory, which are removed at the end.

    A lock lasts as long as this process, in the eyes of other containers too, where its number
    means nothing: `sweep` removes what belongs to a name whose lock nobody holds.
    """
    name = f"{_prefix(os.getpid())}{secrets.token_hex(4)}"
    lock = os.open(SHARED_MEMORY / f"{name}.lock", os.O_CREAT | os.O_EXCL | os.O_RDONLY, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        directory_of(name).mkdir(mode=0o700)
        yield name
    finally:
        _clear(name)
        os.close(lock)


def directory_of(name: str) -> Path:
    return Path(tempfile.gettempdir()) / name


def memory_of(server: int) -> list[Path]:
    """The shared memory, and the lock, of the `sangam serve` with this process id."""
    return list(SHARED_MEMORY.glob(f"{_prefix(server)}*"))


def make_private(name: str) -> None:
    """Closes shared memory, through which requests and answers pass, to other users.

    Triton makes it readable for all, whatever the umask.
    """
    for path in SHARED_MEMORY.glob(f"{name}*"):
        with contextlib.suppress(FileNotFoundError):
            path.chmod(0o600)


def sweep() -> None:
    """Removes what servers of this user that were killed have left."""
    for path in SHARED_MEMORY.glob("sangam_*.lock"):
        # A server that runs has the lock; files of others may not be opened.
        with contextlib.suppress(OSError):
            lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid():
                    _clear(path.stem)
            finally:
                os.close(lock)
    places = meeting_path(0).parent
    if places.exists() and is_own(places):
        for place in places.iterdir():
            if not is_running(int(place.name)):
                shutil.rmtree(place, ignore_errors=True)


def _prefix(server: int) -> str:
    return f"sangam_{server}_"


def _clear(name: str) -> None:
    shutil.rmtree(directory_of(name), ignore_errors=True)
    for path in SHARED_MEMORY.glob(f"{name}*"):
        path.unlink(missing_ok=True)
