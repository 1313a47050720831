"""The class that Triton's Python backend drives, one object and one process an instance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils

if TYPE_CHECKING:
    from sangam_backend.server.host import Host


class TritonPythonModel:
    """Decoupled: execute() hands requests over, the host's threads answer them."""

    host: Host
    engine_command = ("-m", "sangam_backend.server.engine_process")

    def initialize(self, args: dict[str, str]) -> None:
        # With NumPy 2 the stub reads wrong inputs and sends empty outputs, without any error.
        if int(np.__version__.split(".")[0]) >= 2:
            raise pb_utils.TritonModelException(
                f"NumPy is {np.__version__}, this Triton server needs a version below 2: "
                "pip install 'numpy<2' for the first python3 on PATH"
            )
        # Triton imports this module in short-lived processes too.
        from sangam_backend.server.host import Host, StartError

        try:
            self.host = Host(args, self.engine_command)
        except StartError as error:
            raise pb_utils.TritonModelException(str(error)) from error

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self.host.accept(request)

    def finalize(self) -> None:
        self.host.close()
