"""Kernels in the Triton language, each with a torch twin."""
