"""Resizing: nearest and bilinear, as torch.nn.functional.interpolate."""

from __future__ import annotations

import torch
from torch import Tensor

from ..language.compiler import Args, Kernel
from ..language.loops import each_vector
from ..language.values import Value
from ..language.vectors import Emitter
from ..tape.steps import Step, View, held, step

_TAP = 4
"""Words per output row or column: the two inputs it lies between, and their weights."""


def nearest_step(
    x: View,
    y: View,
    *,
    scale: tuple[float, float] | None = None,
    exact: bool = False,
    even: bool = False,
) -> Step:
    """Each output pixel is the input pixel at its place; `scale` is interpolate's scale_factor.

    If `even`, what becomes as long or twice as long does so pixel by pixel, whatever the scale.
    """

    def taps(size: int, wanted: int, factor: float | None) -> Tensor:
        ignored = even and wanted in (size, 2 * size)
        return _nearest(size, wanted, None if ignored else factor, exact)

    return _step(x, y, [*map(taps, x.shape[2:], y.shape[2:], scale or (None, None))])


def bilinear_step(
    x: View,
    y: View,
    *,
    align_corners: bool = False,
    scale: tuple[float, float] | None = None,
    still: tuple[bool, bool] = (False, False),
) -> Step:
    """Each output pixel is a mean of the four around its place, weighted by nearness.

    Rows or columns that stay `still` are means of themselves and themselves: torch does nothing
    along such a side, and takes no infinity 0 times.
    """
    factors = scale or (None, None)
    sizes = zip(x.shape[2:], y.shape[2:], factors, still, strict=True)
    taps = [_itself(i) if stays else _linear(i, o, s, align_corners) for i, o, s, stays in sizes]
    return _step(x, y, taps, mixed=True)


def _itself(size: int) -> Tensor:
    index = torch.arange(size)
    return _taps(index, index, torch.full((size,), 0.5))


def _step(x: View, y: View, taps: list[Tensor], *, mixed: bool = False) -> Step:
    n, c, h, w = x.shape
    out_h, out_w = y.shape[2:]
    sizes = {"n": n, "c": c, "h": h, "w": w, "out_h": out_h, "out_w": out_w}
    rows, columns = taps
    for table, size in ((rows, h), (columns, w)):
        held(table[:, :2], size)
    return step(
        RESIZE,
        x=x,
        x_pixel=x.pixel,
        y=y,
        y_pixel=y.pixel,
        **sizes,
        rows=rows,
        columns=columns,
        mixed=int(mixed),
    )


def _nearest(size: int, wanted: int, scale: float | None, exact: bool) -> Tensor:
    place = nearest_places(size, wanted, scale, exact=exact)
    return _taps(place, place, torch.zeros(wanted))


def nearest_places(
    size: int, wanted: int, scale: float | None = None, *, exact: bool = False
) -> Tensor:
    """For each of `wanted` pixels along a side, the one of `size` that torch finds nearest.

    >>> nearest_places(3, 5).tolist(), nearest_places(3, 5, exact=True).tolist()
    ([0.0, 0.0, 1.0, 1.0, 2.0], [0.0, 0.0, 1.0, 2.0, 2.0])

    `exact` compares the middles of pixels, as the mode "nearest-exact" does.
    """
    # torch computes places in float32; so must we, or the pixel beside would be taken at times.
    step_ = torch.tensor(1 / scale if scale else size / wanted, dtype=torch.float32)
    index = torch.arange(wanted, dtype=torch.float32) + (0.5 if exact else 0.0)
    return (index * step_).floor().clamp(max=size - 1)


def _linear(size: int, wanted: int, scale: float | None, align_corners: bool) -> Tensor:
    index = torch.arange(wanted, dtype=torch.float32)
    if wanted == size:
        # As torch does, without neighbours: 0 times their NaN is NaN, as is 0 times an infinity.
        return _taps(index, index, torch.zeros(wanted))
    if align_corners:
        place = index * ((size - 1) / (wanted - 1) if wanted > 1 else 0.0)
    else:
        step_ = torch.tensor(1 / scale if scale else size / wanted, dtype=torch.float32)
        place = ((index + 0.5) * step_ - 0.5).clamp(min=0)
    low = place.floor().clamp(max=size - 1)
    high = (low + 1).clamp(max=size - 1)
    return _taps(low, high, (place - low).clamp(0, 1))


def _taps(low: Tensor, high: Tensor, share: Tensor) -> Tensor:
    """Per output: the first and the second input, and their weights as float32 bits, as int64."""
    weights = [part.float().contiguous().view(torch.int32).long() for part in (1 - share, share)]
    return torch.stack([low.long(), high.long(), *weights], dim=1).contiguous()


def _emit_resize(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    begin, end = e.share(a.n * a.out_h, thread, threads)
    with e.range(begin, end) as row:
        top, bottom, upper, lower = _read(e, a.rows, row % a.out_h)
        image = a.x.floats() + row // a.out_h * a.h * a.w * a.x_pixel
        lines = [image + line * a.w * a.x_pixel for line in (top, bottom)]
        with e.range(0, a.out_w) as column:
            left, right, nearer, farther = _read(e, a.columns, column)
            corners = [line + side * a.x_pixel for line in lines for side in (left, right)]
            shares = [e.float_of_bits(part) for part in (upper, lower, nearer, farther)]
            target = a.y.floats() + (row * a.out_w + column) * a.y_pixel

            def copy(c: Value, mask: Value | None) -> None:
                e.store(e.load(corners[0] + c, mask), target + c, mask)

            def mix(c: Value, mask: Value | None) -> None:
                values = [e.load(corner + c, mask) for corner in corners]
                up = e.fma(values[1], shares[3], values[0] * shares[2])
                down = e.fma(values[3], shares[3], values[2] * shares[2])
                e.store(e.fma(down, shares[1], up * shares[0]), target + c, mask)

            e.branch(
                a.mixed == 0,
                lambda: each_vector(e, 0, a.c, copy),
                lambda: each_vector(e, 0, a.c, mix),
            )


def _read(e: Emitter, table: Value, index: Value) -> list[Value]:
    return [e.read(table.integers() + (index * _TAP + word)) for word in range(_TAP)]


RESIZE = Kernel(
    "resize",
    (
        *("x", "x_pixel", "y", "y_pixel", "n", "c", "h", "w", "out_h", "out_w"),
        *("rows", "columns", "mixed"),
    ),
    _emit_resize,
)
