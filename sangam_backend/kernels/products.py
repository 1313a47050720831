"""Which implementation computes each matrix product: the fastest of several, as measured.

For few rows the libraries' own choices of kernels are up to a third slower than the other's, and
neither is the better one for all shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sangam_backend.kernels.layers import Tile, gated_linear, silu_mul

REPLAYS = 3
# How much faster than the default another one must be: less is noise.
WORTH = 0.98
# More rows are no longer bound by reading the weights, and the libraries' products are faster.
FEW_ROWS = 64
# Of numbers of 2 bytes, as large as shared memory allows.
TILES = (Tile(64, 128, 3), Tile(64, 128, 4), Tile(32, 128, 4), Tile(128, 64, 4))

Weights = Sequence[tuple[Tensor, Tensor | None]]
"""Of one product in several layers, enough that none is found in the cache; with its bias."""
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
Gated = Callable[[Tensor, Tensor], Tensor]


class Shape(NamedTuple):
    rows: int
    columns: int
    depth: int


class Products:
    """The ways found for shapes that were measured; PyTorch's own for all others."""

    def __init__(self) -> None:
        self._linear: dict[Shape, Linear] = {}
        self._gated: dict[Shape, Gated] = {}

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._linear.get(_shape(x, weight), F.linear)(x, weight, bias)

    def gated_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """silu(gate) * up of x [n, d], where weight [2 * i, d] makes gate and up; [n, i]."""
        return self._gated.get(_shape(x, weight), self._gated_by_linear)(x, weight)

    def tune(self, linears: Iterable[Weights], gate_up: Weights, row_counts: Iterable[int]) -> None:
        """Measures products of so many rows, each with the weights of several layers in turn."""
        linears = [*linears, gate_up]
        for rows in row_counts:
            for weights in linears:
                self._tune_linear(rows, weights)
            if rows <= FEW_ROWS and gate_up[0][0].element_size() == 2:
                self._tune_gated(rows, [weight for weight, _ in gate_up])

    def _tune_linear(self, rows: int, weights: Weights) -> None:
        x = _random(rows, weights[0][0])

        def measure(way: Linear) -> float:
            return _measure(lambda: [way(x, weight, bias) for weight, bias in weights])

        if measure(cublaslt) < WORTH * measure(F.linear):
            self._linear[_shape(x, weights[0][0])] = cublaslt

    def _tune_gated(self, rows: int, weights: list[Tensor]) -> None:
        x, (double_width, depth) = _random(rows, weights[0]), weights[0].shape

        def measure(way: Gated) -> float:
            return _measure(lambda: [way(x, weight) for weight in weights])

        best = WORTH * measure(self._gated_by_linear)
        for tile in TILES:
            if depth % tile.depth or double_width % (2 * tile.columns):
                continue
            way = functools.partial(gated_linear, tile=tile)
            if (time := measure(way)) < best:
                best = time
                self._gated[_shape(x, weights[0])] = way

    def _gated_by_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return silu_mul(self.linear(x, weight))


def cublaslt(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    library = torch.backends.cuda.preferred_blas_library
    before = library()
    library("cublaslt")
    try:
        return F.linear(x, weight, bias)
    finally:
        library(before)


def _shape(x: Tensor, weight: Tensor) -> Shape:
    return Shape(x.shape[0], *weight.shape)


def _random(rows: int, weight: Tensor) -> Tensor:
    return torch.randn(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)


def _measure(work: Callable[[], object]) -> float:
    """Milliseconds of some launches in a CUDA graph, at best."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)))
    return min(times)
