"""The Triton model. Only this package imports triton_python_backend_utils."""
