"""Pixels that are moved, not changed: padding, slices, repetition, frames joined in a row.

Two tables say for each line and each column of the result which one of the input it is. As the
frames of a volume lie one below the other, its lines are those of all frames, and one kernel serves
images and volumes:

    F.pad(x, (1, 0, 0, 0, 2, 0)) of 2 frames of 2 lines    frames -1 -1 0 1, each of lines 0 1
    rows     -1 -1 -1 -1 0 1 2 3                           two frames of `fill`, then those of x
    columns  -1 0 1 2 ...                                  a pixel of `fill`, then those of x

A concatenation is a step for each part, which leaves the lines of the others as they are.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..language.compiler import Args, Kernel
from ..language.loops import each_vector
from ..language.values import Value
from ..language.vectors import Emitter
from ..tape.steps import Step, View, held, step

OUTSIDE, LEFT = -1, -2
"""What a table says of a line or a column that is filled, and of one that is not written."""


def move_step(x: View, y: View, rows: Tensor, columns: Tensor, *, fill: float = 0.0) -> Step:
    """Each pixel of `y` is the one of `x` in the line and the column that the tables name."""
    n, c, out_h, out_w = y.shape
    h, w = x.shape[2:]
    return step(
        MOVE,
        x=x,
        x_pixel=x.pixel,
        y=y,
        y_pixel=y.pixel,
        n=n,
        c=c,
        h=h,
        w=w,
        out_h=out_h,
        out_w=out_w,
        rows=held(rows, h, signs=-LEFT),
        columns=held(columns, w, signs=-LEFT),
        fill=float(fill),
    )


def fill_step(x: View, y: View, number: float) -> Step:
    """`number` in all places of `y`; nothing of `x` is read."""
    rows, columns = (torch.full((size,), OUTSIDE) for size in y.shape[2:])
    return move_step(x, y, rows, columns, fill=number)


def in_frames(frames: Tensor, rows: Tensor, h: int) -> Tensor:
    """The table for the lines of all frames, from one for frames and one for the lines of each.

    >>> in_frames(torch.tensor([-1, 0, 1]), torch.tensor([0, 1]), 2).tolist()
    [-1, -1, 0, 1, 2, 3]
    """
    deep, high = torch.meshgrid(frames, rows, indexing="ij")
    # What one of the two leaves or fills is left or filled.
    none = torch.minimum(deep, high)
    return torch.where(none < 0, none, deep * h + high).flatten()


def _emit(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    begin, end = e.share(a.n * a.out_h, thread, threads)
    with e.range(begin, end) as line:
        row = e.read(a.rows.integers() + line % a.out_h)
        source = a.x.floats() + (line // a.out_h * a.h + row) * a.w * a.x_pixel
        with e.when(row != LEFT), e.range(0, a.out_w) as place:
            column = e.read(a.columns.integers() + place)
            target = a.y.floats() + (line * a.out_w + place) * a.y_pixel
            pixel = source + column * a.x_pixel

            def copy(
                c: Value, mask: Value | None, pixel: Value = pixel, to: Value = target
            ) -> None:
                e.store(e.load(pixel + c, mask), to + c, mask)

            def clear(c: Value, mask: Value | None, to: Value = target) -> None:
                e.store(e.broadcast(e.float_of_bits(a.fill)), to + c, mask)

            with e.when(column != LEFT):
                e.branch(
                    (row >= 0) & (column >= 0),
                    partial(each_vector, e, 0, a.c, copy),
                    partial(each_vector, e, 0, a.c, clear),
                )


MOVE = Kernel(
    "move",
    (
        *("x", "x_pixel", "y", "y_pixel", "n", "c", "h", "w", "out_h", "out_w"),
        *("rows", "columns", "fill"),
    ),
    _emit,
)
