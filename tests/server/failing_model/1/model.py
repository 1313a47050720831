"""The colocated model, with another engine process."""

from __future__ import annotations

from pathlib import Path

from sangam_backend.server.model import TritonPythonModel

TritonPythonModel.engine_command = (str(Path(__file__).with_name("failing_engine.py")),)

__all__ = ["TritonPythonModel"]
