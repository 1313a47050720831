"""The class that Triton's Python backend drives, one object and one process an instance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import triton_python_backend_utils as pb_utils

if TYPE_CHECKING:
    from sangam_backend.server.instance import Instance


class TritonPythonModel:
    """Decoupled: execute() hands requests over, the instance's threads answer them."""

    instance: Instance

    def initialize(self, args: dict[str, str]) -> None:
        # With NumPy 2 the stub reads wrong inputs and sends empty outputs, without any error.
        if int(np.__version__.split(".")[0]) >= 2:
            raise pb_utils.TritonModelException(
                f"NumPy is {np.__version__}, this Triton server needs a version below 2: "
                "pip install 'numpy<2' for the first python3 on PATH"
            )
        # Triton imports this module in short-lived processes too, which need no torch.
        from sangam_backend.config import ConfigError
        from sangam_backend.server.open_instance import open_instance

        try:
            self.instance = open_instance(args)
        except (ConfigError, ValueError) as error:
            raise pb_utils.TritonModelException(str(error)) from error

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            self.instance.accept(request)

    def finalize(self) -> None:
        self.instance.close()
