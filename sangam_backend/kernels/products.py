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

from sangam_backend.device import replay_milliseconds
from sangam_backend.kernels.layers import Tile, gated_linear, silu_mul

# How much faster than the default another one must be: less is noise.
WORTH = 0.98
WORTH_OF_STEP = 0.997
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

    def tune(self, products: Iterable[Weights], row_counts: Iterable[int]) -> None:
        """Measures products of so many rows, each with the weights of several layers in turn."""
        products = [*products]
        for rows in row_counts:
            for weights in products:
                self._tune_linear(rows, weights)

    def _tune_linear(self, rows: int, weights: Weights) -> None:
        x = _random(rows, weights[0][0])

        def seconds(way: Linear) -> float:
            return measure(lambda: [way(x, weight, bias) for weight, bias in weights])

        if seconds(cublaslt) < WORTH * seconds(F.linear):
            self._linear[_shape(x, weights[0][0])] = cublaslt

    def tune_gated(self, rows: int, weight: Tensor, measure_step: Callable[[], float]) -> None:
        """Chooses how few rows are gated, by the time of a whole iteration.

        What the fused kernel saves is mostly waiting between kernels, which a product alone
        does not show.
        """
        shape = Shape(rows, *weight.shape)
        if rows > FEW_ROWS or weight.element_size() != 2:
            return
        best, chosen = WORTH_OF_STEP * measure_step(), None
        for tile in TILES:
            if shape.depth % tile.depth or shape.columns % (2 * tile.columns):
                continue
            self._gated[shape] = functools.partial(gated_linear, tile=tile)
            if (time := measure_step()) < best:
                best, chosen = time, self._gated[shape]
        if chosen is None:
            self._gated.pop(shape, None)
        else:
            self._gated[shape] = chosen

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


def measure(work: Callable[[], object]) -> float:
    """Milliseconds of some launches in a CUDA graph, at best."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return replay_milliseconds(graph)
