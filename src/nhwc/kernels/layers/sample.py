"""Sampling an image bilinearly where a grid says, as torch.nn.functional.grid_sample.

A place between four pixels is their mean, weighted by nearness. What lies outside is read from a
row of zeros: its weight then needs no mask, and no number of the image is touched that torch does
not touch. Detectors with deformable attention sample so, some places for each query and head.
"""

from __future__ import annotations

import torch

from ..language.compiler import Args, Kernel
from ..language.loops import each_vector, padded
from ..language.values import Value
from ..language.vectors import Emitter
from ..tape.steps import Step, View, step


def sample_step(x: View, grid: View, y: View, *, border: bool, corners: bool) -> Step:
    """y is x at the places that `grid` names for each pixel, in two channels: column and row.

    -1 and 1 are the edges of the image, or with `corners` the middles of the pixels at them. Beyond
    there are zeros, or with `border` the pixels at the edges.
    """
    n, c, h, w = x.shape
    return step(
        SAMPLE,
        x=x,
        x_pixel=x.pixel,
        other=grid,
        other_pixel=grid.pixel,
        y=y,
        y_pixel=y.pixel,
        c=c,
        h=h,
        w=w,
        pixels=y.pixels,
        area=y.pixels // n,
        zoom_h=float((h - corners) / 2),
        zoom_w=float((w - corners) / 2),
        offset=0.0 if corners else 0.5,
        outside=int(not border),
        zeros=torch.zeros(padded(c)),
    )


def _emit_sample(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    begin, end = e.share(a.pixels, thread, threads)
    with e.range(begin, end) as pixel:
        grid = a.other.floats() + pixel * a.other_pixel
        image = a.x.floats() + pixel // a.area * a.h * a.w * a.x_pixel
        left, right_share = _place(e, a, e.read(grid), a.zoom_w, a.w)
        top, lower_share = _place(e, a, e.read(grid + 1), a.zoom_h, a.h)
        corners = [
            _corner(e, a, image, top + down, left + right) for down in (0, 1) for right in (0, 1)
        ]
        shares = [
            vertical * horizontal
            for vertical in (1.0 - lower_share, lower_share)
            for horizontal in (1.0 - right_share, right_share)
        ]
        target = a.y.floats() + pixel * a.y_pixel

        def mix(c: Value, mask: Value | None) -> None:
            total = e.load(corners[0] + c, mask) * shares[0]
            for corner, share in zip(corners[1:], shares[1:], strict=True):
                total = e.fma(e.load(corner + c, mask), e.broadcast(share), total)
            e.store(total, target + c, mask)

        each_vector(e, 0, a.c, mix)


def _place(e: Emitter, a: Args, given: Value, zoom: Value, size: Value) -> tuple[Value, Value]:
    """The pixel in front of a place along a side, and the share of the pixel behind it."""
    place = (given + 1.0) * e.float_of_bits(zoom) - e.float_of_bits(a.offset)
    # Two pixels in front of the image, neither the place nor the pixel behind it is inside.
    first, last = e.to_float(-2 * a.outside), e.to_float(size - 1 + a.outside)
    bounded = e.min(e.max(place, first), last)
    whole = e.whole(bounded)
    whole = e.select(e.to_float(whole) > bounded, whole - 1, whole)
    # At the border what is no number is the first pixel. Else what is not finite has no place.
    placed = (a.outside == 0) | (place - place == 0.0)
    return whole, e.select(placed, bounded, e.f32(float("nan"))) - e.to_float(whole)


def _corner(e: Emitter, a: Args, image: Value, row: Value, column: Value) -> Value:
    inside = (row >= 0) & (row < a.h) & (column >= 0) & (column < a.w)
    found = image + (row * a.w + column) * a.x_pixel
    return e.select(inside, found, a.zeros.floats())


SAMPLE = Kernel(
    "sample",
    (
        *("x", "x_pixel", "other", "other_pixel", "y", "y_pixel", "c", "h", "w", "pixels", "area"),
        *("zoom_h", "zoom_w", "offset", "outside", "zeros"),
    ),
    _emit_sample,
)
