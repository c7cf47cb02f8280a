"""Pads with a number other than zero along one dimension, as linear attention has them.

A pad with zeros costs nothing until somebody reads it (`moves`); here the whole is written anew.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ...graph import bound
from ...kernels.layers.moving import fill_step
from ...kernels.programs.builder import Builder
from ...kernels.programs.moved import Moved, as_rows, place, rows_of
from ..implementation import Implementation
from .calls import OperatorCall
from .rows import as_it_lies


def padded(call: OperatorCall) -> Implementation | None:
    """A tensor with one number before or behind the others of one dimension."""
    given = bound(call.node, ("input", "pad", "mode", "value"))
    pad: Any = given.get("pad")
    value: Any = given.get("value")
    plain = given.get("mode", "constant") == "constant" and type(value) in (int, float)
    if not plain or len(call.layer.inputs) != 1 or not isinstance(pad, (tuple, list)):
        return None
    sizes = [*zip(pad[::2], pad[1::2], strict=True)]
    along = [number for number, size in enumerate(sizes) if size != (0, 0)]
    if len(along) != 1 or any(type(one) is not int or one < 0 for one in pad):
        return None
    dim, (before, behind) = -1 - along[0], sizes[along[0]]
    fill = partial(fill_step, number=float(value))

    def emit(builder: Builder, constants: None, x: Moved) -> Moved:
        turned = Moved(x.buffer, x.where.movedim(dim, -1))
        width = turned.shape[-1]
        whole = (*turned.shape[:-1], before + width + behind)
        y = builder.buffer(rows_of(whole))
        made = as_rows(y, whole).where
        place(builder, turned, Moved(y, made.narrow(-1, before, width)))
        for first, size in ((0, before), (before + width, behind)):
            if size:
                builder.add(fill, x.buffer, builder.slice(y, first, first + size))
        return Moved(y, made.movedim(-1, dim))

    return as_it_lies(call.record, call.layer, emit)
