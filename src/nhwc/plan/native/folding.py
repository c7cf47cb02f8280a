"""`F.fold`, which puts windows back where `F.unfold` took them, and sums where they overlap.

Taps of a window that lie within one stride of each other never meet, whichever windows they are of:

    filter of 3, stride 2        taps  0 1 2 | 0 1 2 | 0 1 2
                                 row   0 1 2   2 3 4   4 5 6        {0, 1} fill each place once, {2}
                                                                    fills some of them a second time

So the result is a sum of as many tensors as there are such groups, each of which is `x` moved on
paper. Windows that do not overlap, as those of patches, are one group, and cost nothing.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.layers.elementwise import add_step
from ...kernels.programs.builder import Builder
from ...kernels.programs.moved import Moved, as_image, settled
from ..implementation import Implementation
from .calls import OperatorCall
from .rows import as_it_lies

_ARGUMENTS = ("input", "output_size", "kernel_size", "dilation", "padding", "stride")
_LEFT_OUT = {"dilation": 1, "padding": 0, "stride": 1}


def fold(call: OperatorCall) -> Implementation | None:
    """Our kernel for a call of `F.fold` or of its module on windows of several images."""
    given = vars(call.module) if call.module is not None else call.settings(_ARGUMENTS)
    if given is None:
        return None
    sizes: dict[str, Any] = {
        name: _pair(given.get(name, _LEFT_OUT.get(name))) for name in _ARGUMENTS[1:]
    }
    if None in sizes.values() or len(call.seen(0).shape) != 3:
        return None
    groups = _groups(sizes)

    def parts(x: Moved) -> list[Moved]:
        n, _, count = x.shape
        # Torch has it for floats alone; doubles count as far as any memory goes.
        places = x.where.double().add(1).view(n, -1, *groups[0].shape, count)
        taken = (places * group[..., None] for group in groups)
        found = (F.fold(one.view(x.shape), **sizes).sub(1).to(x.where.dtype) for one in taken)
        return [Moved(x.buffer, where) for where in found]

    def emit(builder: Builder, constants: None, x: Moved) -> Moved:
        first, *others = parts(x)
        if not others:
            return first
        total = settled(builder, first)
        for other in others:
            y = builder.buffer(first.shape)
            builder.add(add_step, settled(builder, other), total, y)
            total = y
        return as_image(total, first.shape)

    return as_it_lies(call.record, call.layer, emit, free=len(groups) == 1)


def _groups(sizes: dict[str, Any]) -> list[Tensor]:
    """Which taps of a window each group has: ones and zeros, by rows and columns."""
    along = [
        torch.arange(taps) * apart // stride
        for taps, apart, stride in zip(
            sizes["kernel_size"], sizes["dilation"], sizes["stride"], strict=True
        )
    ]
    rows, columns = along
    pairs = product(rows.unique(), columns.unique())
    return [(rows == row)[:, None] * (columns == column).double() for row, column in pairs]


def _pair(value: Any) -> Any:
    """Two numbers; None where they are something else."""
    values = (value, value) if type(value) is int else value
    plain = isinstance(values, (tuple, list)) and all(type(one) is int for one in values)
    return tuple(values) if plain else None
