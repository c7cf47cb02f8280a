"""The arithmetic of Winograd's minimal filtering: F(2, 3) and F(4, 3), on vectors of channels.

m outputs of a filter of three taps come from m + 2 products instead of 3 m. Input, filter and
products go through small linear maps; nested for rows and columns they serve images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .values import Value
from .vectors import Emitter

Map = Callable[[Emitter, Sequence[Value]], list[Value]]


@dataclass(frozen=True)
class Transform:
    """F(m, 3): `size` = m + 2 inputs see m outputs. `filter` is the map of the three taps."""

    outputs: int
    input: Map
    output: Map
    filter: tuple[tuple[float, float, float], ...]

    @property
    def size(self) -> int:
        return self.outputs + 2

    def filters(self, weight: Tensor) -> Tensor:
        """Weights K, C, 3, 3 as size * size matrices C x K, computed in float64."""
        g = torch.tensor(self.filter, dtype=torch.float64)
        k, c = weight.shape[:2]
        taps = weight.detach().permute(2, 3, 1, 0).reshape(9, c * k).double()
        return (torch.kron(g, g) @ taps).float().reshape(self.size**2, c, k)


def _input2(e: Emitter, d: Sequence[Value]) -> list[Value]:
    return [d[0] - d[2], d[1] + d[2], d[2] - d[1], d[1] - d[3]]


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


def _output4(e: Emitter, m: Sequence[Value]) -> list[Value]:
    near, near_odd, far, far_odd = m[1] + m[2], m[1] - m[2], m[3] + m[4], m[3] - m[4]
    return [
        m[0] + near + far,
        e.fma(far_odd, 2.0, near_odd),
        e.fma(far, 4.0, near),
        e.fma(far_odd, 8.0, near_odd) + m[5],
    ]


F2 = Transform(
    outputs=2,
    input=_input2,
    output=_output2,
    filter=((1, 0, 0), (1 / 2, 1 / 2, 1 / 2), (1 / 2, -1 / 2, 1 / 2), (0, 0, 1)),
)
F4 = Transform(
    outputs=4,
    input=_input4,
    output=_output4,
    filter=(
        (1 / 4, 0, 0),
        (-1 / 6, -1 / 6, -1 / 6),
        (-1 / 6, 1 / 6, -1 / 6),
        (1 / 24, 1 / 12, 1 / 6),
        (1 / 24, -1 / 12, 1 / 6),
        (0, 0, 1),
    ),
)


def emit_twice(e: Emitter, one: Map, grid: Sequence[Sequence[Value]]) -> list[list[Value]]:
    """Apply a map to the columns of a grid, then to its rows."""
    columns = [one(e, column) for column in zip(*grid, strict=True)]
    return [one(e, row) for row in zip(*columns, strict=True)]
