"""The arithmetic of Winograd's minimal filtering: F(2, 3) and F(4, 3), on vectors of channels.

m outputs of a filter of three taps come from m + 2 products instead of 3 m. Input, filter and
products go through small linear maps; nested for rows and columns they serve images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..language.values import Value
from ..language.vectors import Emitter

Map = Callable[[Any, Any], list[Any]]
"""Turns a row of numbers into another; the first argument, an emitter say, computes them."""


@dataclass(frozen=True)
class Transform:
    """F(m, 3): `size` = m + 2 inputs see m outputs.

    The numbers that `filter` makes of three taps are still to be multiplied by `scale`, one by one.
    """

    outputs: int
    input: Map
    filter: Map
    scale: tuple[float, ...]
    output: Map

    @property
    def size(self) -> int:
        return self.outputs + 2

    def filters(self, weight: Tensor) -> Tensor:
        """Weights K, C, 3, 3 as size * size matrices C x K, computed in float64."""
        scale = torch.tensor(self.scale, dtype=torch.float64)[:, None]
        g = scale * torch.stack(self.filter(_Tensors, torch.eye(3, dtype=torch.float64)))
        k, c = weight.shape[:2]
        taps = weight.detach().permute(2, 3, 1, 0).reshape(9, c * k).double()
        return (torch.kron(g, g) @ taps).float().reshape(self.size**2, c, k)


class _Tensors:
    """An emitter's `fma`, computed at once, on tensors."""

    @staticmethod
    def fma(a: Tensor, b: float, c: Tensor) -> Tensor:
        return a * b + c


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


def _input2(e: Emitter, d: Sequence[Value]) -> list[Value]:
    return [d[0] - d[2], d[1] + d[2], d[2] - d[1], d[1] - d[3]]


def _filter2(e: Emitter, g: Sequence[Value]) -> list[Value]:
    outer = g[0] + g[2]
    return [g[0], outer + g[1], outer - g[1], g[2]]


def _output2(e: Emitter, m: Sequence[Value]) -> list[Value]:
    return [m[0] + m[1] + m[2], m[1] - m[2] - m[3]]


def _input4(e: Emitter, d: Sequence[Value]) -> list[Value]:
    even, odd = e.fma(d[2], -4.0, d[4]), e.fma(d[1], -4.0, d[3])
    near, far = d[4] - d[2], d[3] - d[1]
    return [
        e.fma(d[0], 4.0, e.fma(d[2], -5.0, d[4])),
        even + odd,
        even - odd,
        e.fma(far, 2.0, near),
        e.fma(far, -2.0, near),
        e.fma(d[1], 4.0, e.fma(d[3], -5.0, d[5])),
    ]


def _filter4(e: Emitter, g: Sequence[Value]) -> list[Value]:
    near, far = g[0] + g[2], e.fma(g[2], 4.0, g[0])
    return [g[0], near + g[1], near - g[1], e.fma(g[1], 2.0, far), e.fma(g[1], -2.0, far), g[2]]


def _output4(e: Emitter, m: Sequence[Value]) -> list[Value]:
    near, near_odd, far, far_odd = m[1] + m[2], m[1] - m[2], m[3] + m[4], m[3] - m[4]
    return [
        m[0] + near + far,
        e.fma(far_odd, 2.0, near_odd),
        e.fma(far, 4.0, near),
        e.fma(far_odd, 8.0, near_odd) + m[5],
    ]


F2 = Transform(2, _input2, _filter2, (1, 1 / 2, 1 / 2, 1), _output2)
F4 = Transform(4, _input4, _filter4, (1 / 4, -1 / 6, -1 / 6, 1 / 24, 1 / 24, 1), _output4)


def emit_twice(e: Emitter, one: Map, grid: Sequence[Sequence[Value]]) -> list[list[Value]]:
    """Apply a map to the columns of a grid, then to its rows."""
    columns = [one(e, column) for column in zip(*grid, strict=True)]
    return [one(e, row) for row in zip(*columns, strict=True)]
