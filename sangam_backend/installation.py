"""Where the Triton server is, and what it needs to run."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from sangam_backend.config import ConfigError


class Triton(NamedTuple):
    """Where the server is and what it needs."""

    executable: Path
    backends: Path
    library_path: str


def find_triton(work: Path) -> Triton:
    """Finds a server: named by the environment, on PATH, or of the nvidia-pytriton wheel.

    Args:
        work: Where a backend directory may be made.

    Raises:
        ConfigError: there is none, or it lacks a library.
    """
    if executable := os.environ.get("SANGAM_TRITONSERVER"):
        backends = os.environ.get("SANGAM_BACKEND_DIRECTORY", "/opt/tritonserver/backends")
        libraries = os.environ.get("SANGAM_TRITON_LIBS", os.environ.get("LD_LIBRARY_PATH", ""))
        found = Triton(Path(executable), Path(backends), libraries)
    elif on_path := shutil.which("tritonserver"):
        root = Path(on_path).resolve().parent.parent
        found = Triton(Path(on_path), root / "backends", os.environ.get("LD_LIBRARY_PATH", ""))
    else:
        found = _wheel_triton(work)
    for path in (found.executable, found.backends / "python"):
        if not path.exists():
            raise ConfigError(f"{path}: no such file, but the Triton server needs it")
    return found


def _wheel_triton(work: Path) -> Triton:
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "no Triton server: set SANGAM_TRITONSERVER, put tritonserver on PATH, "
            "or pip install 'sangam[server]'"
        )
    package = Path(spec.origin).parent
    version = "{}.{}".format(*sys.version_info)
    stub = package / "tritonserver/python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.exists():
        raise ConfigError(f"nvidia-pytriton has no Python backend for Python {version}")
    backends = work / "backends"
    shutil.copytree(package / "tritonserver/backends/python", backends / "python")
    shutil.copy(stub, backends / "python")
    libraries = [str(package.parent / "nvidia_pytriton.libs"), str(_libpython_directory())]
    executable = package / "tritonserver/bin/tritonserver"
    return Triton(executable, backends, os.pathsep.join(libraries))


def _libpython_directory() -> Path:
    """The stub embeds Python, so it needs this Python's shared library."""
    directory = Path(sysconfig.get_config_var("LIBDIR") or "")
    name = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    if not (directory / name).exists():
        raise ConfigError(
            f"{directory / name}: no such file; the Triton Python backend needs a Python built "
            "with --enable-shared (Debian: the package libpython3.N)"
        )
    return directory
