"""The arithmetic of Winograd's minimal filtering, on vectors of channels.

Numbers in a row are the coefficients of a polynomial, and to filter is to multiply polynomials. A
product of polynomials is known from its values in as many points as it has coefficients, and there
it is a product of numbers: so m outputs of a filter of r taps come from m + r - 1 products instead
of m r. The points are 0, a few numbers with both signs, and infinity, where a polynomial counts by
its last coefficient alone. Values at p and -p share their even and their odd powers.

    F(m, r)         products for an output    instead of
    F(3, 2)                 1.33                  2
    F(2, 3)                 2                     3
    F(4, 3)                 1.5                   3
    F(3, 4)                 2                     4
    F(4, 5)                 2                     5
    F(4, 7)                 2.5                   7

The more points there are, and the farther from 1, the more digits are lost. Nested for rows and
columns the transforms serve images, where products are saved, and digits lost, twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..language.values import Value
from ..language.vectors import Emitter

Map = Callable[[Any, Sequence[Any]], list[Any]]
"""Turns a row of numbers into another; the first argument, an emitter say, computes them."""


_POINTS = {1: (), 4: (1.0,), 6: (0.75, 1.5), 8: (0.5, 1.0, 2.0), 10: (0.375, 0.75, 1.375, 2.5)}
"""The points that are taken with both signs, for a number of inputs.

They lie on both sides of 1, where powers neither grow nor vanish: with 1 and 2 instead of 0.75 and
1.5 tiles of 4x4 err twice as much. Their squares are numbers of a few bits.
"""


@dataclass(frozen=True)
class Transform:
    """F(outputs, taps), of which `size` inputs see the outputs: one, or an even number of them.

    The numbers that `filter` makes of the taps are still to be multiplied by `scale`, one by one.
    F(1, 1) leaves a number as it is.

    >>> Transform(2, 3).points, Transform(2, 3).scale
    ((1.0,), (-1.0, 0.5, 0.5, 1.0))
    """

    outputs: int
    taps: int

    @property
    def size(self) -> int:
        return self.outputs + self.taps - 1

    @property
    def points(self) -> tuple[float, ...]:
        """The points but for 0 and infinity, which lack the negative ones."""
        return _POINTS[self.size]

    @property
    def scale(self) -> tuple[float, ...]:
        if self.size == 1:
            return (1.0,)
        finite = [0.0, *(sign * p for p in self.points for sign in (1, -1))]
        return (*(1 / prod(p - other for other in finite if other != p) for p in finite), 1.0)

    def input(self, e: Any, d: Sequence[Any]) -> list[Any]:
        """What the inputs become: of each point the product of x - q over the others q, on them."""
        if self.size == 1:
            return list(d)
        inputs, all_points = d[::-1], _factors(self.points)
        found = [_sum(e, inputs[1::2], all_points)]
        for p in self.points:
            others = _factors([q for q in self.points if q != p])
            found += _both(e, p, _sum(e, inputs[1:-1:2], others), _sum(e, inputs[2::2], others))
        return [*found, _sum(e, inputs[0::2], all_points)]

    def filter(self, e: Any, g: Sequence[Any]) -> list[Any]:
        """The filter's values in the points, before they are scaled."""
        if self.size == 1:
            return list(g)
        found = [g[0]]
        for p in self.points:
            squares = [p ** (2 * i) for i in range(1, self.taps)]
            found += _both(e, p, _sum(e, g[0::2], squares), _sum(e, g[1::2], squares))
        return [*found, g[-1]]

    def output(self, e: Any, m: Sequence[Any]) -> list[Any]:
        """The outputs: sums of the products, times powers of their points."""
        if self.size == 1:
            return list(m)
        pairs = list(zip(m[1:-1:2], m[2:-1:2], strict=True))
        evens, odds = [a + b for a, b in pairs], [a - b for a, b in pairs]
        found = []
        for power in range(self.outputs):
            factors = [p**power for p in self.points]
            terms = odds if power % 2 else evens
            if power in (0, self.outputs - 1):
                # Those of 0 and of infinity count once, in the first and in the last output.
                found.append(_sum(e, [m[-1] if power else m[0], *terms], factors))
            else:
                found.append(_sum(e, [_times(e, terms[0], factors[0]), *terms[1:]], factors[1:]))
        return found


def _factors(points: Sequence[float]) -> list[float]:
    """The coefficients of the product of x - p * p over the points, from the second highest down.

    >>> _factors([1, 2])
    [-5, 4]
    """
    found: list[float] = [1]
    for p in points:
        shifted = [*found, 0]
        found = [a - p * p * b for a, b in zip(shifted, [0, *found], strict=True)]
    return found[1:]


def _sum(e: Any, values: Sequence[Any], factors: Sequence[float]) -> Any:
    """The first value, and each other times its factor; there may be more factors than values."""
    total = values[0]
    for value, factor in zip(values[1:], factors, strict=False):
        total = _plus(e, total, value, factor)
    return total


def _times(e: Any, value: Any, factor: float) -> Any:
    return value if factor == 1 else value * e.vector(factor)


def _both(e: Any, p: float, even: Any, odd: Any) -> list[Any]:
    """even + p odd, and even - p odd."""
    return [_plus(e, even, odd, p), _plus(e, even, odd, -p)]


def _plus(e: Any, total: Any, value: Any, factor: float) -> Any:
    if abs(factor) == 1:
        return total + value if factor == 1 else total - value
    return e.fma(value, float(factor), total)


class _Tensors:
    """An emitter's `fma`, computed at once, on tensors."""

    @staticmethod
    def fma(a: Tensor, b: float, c: Tensor) -> Tensor:
        return a * b + c


class Tiling(NamedTuple):
    """How a tile is transformed: along its columns, downwards, and along its rows."""

    down: Transform
    across: Transform

    @property
    def outputs(self) -> tuple[int, int]:
        """The rows and columns of the result that a tile makes."""
        return self.down.outputs, self.across.outputs

    @property
    def taps(self) -> tuple[int, int]:
        """The rows and columns of the filters it serves."""
        return self.down.taps, self.across.taps

    @property
    def elements(self) -> int:
        """How many numbers of each channel a transformed tile has."""
        return self.down.size * self.across.size

    def input(self, e: Emitter, grid: Sequence[Sequence[Value]]) -> list[list[Value]]:
        return _twice(e, self.down.input, self.across.input, grid)

    def filter(self, e: Emitter, grid: Sequence[Sequence[Value]]) -> list[list[Value]]:
        return _twice(e, self.down.filter, self.across.filter, grid)

    def output(self, e: Emitter, grid: Sequence[Sequence[Value]]) -> list[list[Value]]:
        return _twice(e, self.down.output, self.across.output, grid)

    def filters(self, weight: Tensor) -> Tensor:
        """Weights K, C, R, S as a matrix C x K for each element, computed in float64."""
        k, c, r, s = weight.shape
        taps = weight.detach().permute(2, 3, 1, 0).reshape(r * s, c * k).double()
        return (_matrix(self) @ taps).float().reshape(self.elements, c, k)


@cache
def _matrix(tiling: Tiling) -> Tensor:
    """What turns the taps of a filter into the elements of its tile."""
    return torch.kron(_values(tiling.down), _values(tiling.across))


def _values(t: Transform) -> Tensor:
    """What turns a row of taps into its scaled values in the points."""
    rows = t.filter(_Tensors, [*torch.eye(t.taps, dtype=torch.float64, device="cpu")])
    scale = torch.tensor(t.scale, dtype=torch.float64, device="cpu")
    return scale[:, None] * torch.stack(rows)


def _twice(
    e: Emitter, down: Map, across: Map, grid: Sequence[Sequence[Value]]
) -> list[list[Value]]:
    columns = [down(e, column) for column in zip(*grid, strict=True)]
    return [across(e, row) for row in zip(*columns, strict=True)]


@dataclass(frozen=True)
class Product:
    """A block of transformed tiles and a panel of filters, and where the sums of each element go.

    `filters` has `columns` filters side by side; `packed` has the rows of `count` tiles, of `tiles`
    in all. Behind `sums` there is room to work in.
    """

    filters: Value
    channels: Value
    columns: Value
    packed: Value
    count: Value
    tiles: Value
    sums: Value
