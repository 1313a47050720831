from sangam_backend.server.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
