"""Sampling an image bilinearly where a grid says, as torch.nn.functional.grid_sample.

A place between four pixels is their mean, weighted by nearness. What lies outside is read from a
row of zeros: its weight then needs no mask, and no number of the image is touched that torch does
not touch. Deformable attention samples so, some places of several images for each query and head,
and sums what it finds: `weighted_samples_step` keeps no sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..language.compiler import Args, Kernel
from ..language.loops import each_vector, padded
from ..language.values import INT, Value
from ..language.vectors import Emitter
from ..tape.steps import Step, View, bits, covers, held, step


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


def weighted_samples_step(
    x: View,
    grid: View,
    factors: View,
    y: View,
    *,
    images: Sequence[tuple[int, ...]],
    places: Sequence[int],
    border: bool,
    corners: bool,
) -> Step:
    """y is the sum of samples of several batches of images, each times a number.

    x has all pixels of the first batch, then those of the next; `images` are their rows and
    columns. A pixel of y has as many `places` in each image of its own number. All places lie side
    by side in `grid`, and their factors in `factors`.
    """
    n, queries = y.shape[0], y.shape[2] * y.shape[3]
    firsts, points = [0], list[list[int]]()
    for (h, w), count in zip(images, places, strict=True):
        zooms = [bits((side - corners) / 2) for side in (h, w)]
        points += [[firsts[-1], h, w, *zooms]] * count
        firsts.append(firsts[-1] + n * h * w)
    for view, width in ((grid, 2 * len(points)), (factors, len(points))):
        covers(view, View(None, (n, width, queries, 1), width))
    held(torch.tensor(firsts[-1:]), x.pixels, behind=0)
    return step(
        WEIGHTED_SAMPLES,
        x=x,
        x_pixel=x.pixel,
        other=grid,
        other_pixel=grid.pixel,
        factor=factors,
        factor_pixel=factors.pixel,
        y=y,
        y_pixel=y.pixel,
        c=y.shape[1],
        pixels=y.pixels,
        area=queries,
        points=torch.tensor(points),
        places=len(points),
        offset=0.0 if corners else 0.5,
        outside=int(not border),
        zeros=torch.zeros(padded(y.shape[1])),
    )


class _Image(NamedTuple):
    """Where an image begins, its rows and columns, and half of them as floats."""

    begin: Value
    h: Value
    w: Value
    zoom_h: Value
    zoom_w: Value


def _emit_sample(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    begin, end = e.share(a.pixels, thread, threads)
    zooms = [e.float_of_bits(zoom) for zoom in (a.zoom_h, a.zoom_w)]
    with e.range(begin, end) as pixel:
        grid = a.other.floats() + pixel * a.other_pixel
        image = a.x.floats() + pixel // a.area * a.h * a.w * a.x_pixel
        found = _emit_corners(e, a, _Image(image, a.h, a.w, *zooms), grid)
        target = a.y.floats() + pixel * a.y_pixel

        def mix(c: Value, mask: Value | None) -> None:
            (corner, share), *others = found
            total = e.load(corner + c, mask) * share
            for corner, share in others:
                total = e.fma(e.load(corner + c, mask), e.broadcast(share), total)
            e.store(total, target + c, mask)

        each_vector(e, 0, a.c, mix)


_AT_ONCE = 16
"""Places whose corners are noted before they are read."""

_WORDS = 5
"""Of a place in the table: the first pixel of its images, then what an `_Image` has."""


def _emit_weighted_samples(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    begin, end = e.share(a.pixels, thread, threads)
    corners, shares = e.stack(4 * _AT_ONCE, INT), e.stack(4 * _AT_ONCE)
    with e.range(begin, end) as pixel:
        grid = a.other.floats() + pixel * a.other_pixel
        factors = a.factor.floats() + pixel * a.factor_pixel
        target, image = a.y.floats() + pixel * a.y_pixel, pixel // a.area
        with e.range(0, a.places, _AT_ONCE) as first:
            count = e.min(a.places - first, e.i64(_AT_ONCE))
            with e.range(0, count) as place:
                point = a.points.integers() + (first + place) * _WORDS
                found = _emit_corners(
                    e, a, _emit_image(e, a, point, image), grid + (first + place) * 2
                )
                factor = e.read(factors + first + place)
                for number, (corner, share) in enumerate(found):
                    e.write(corner.address(), corners + (place * 4 + number))
                    e.write(share * factor, shares + (place * 4 + number))

            def mix(c: Value, mask: Value | None) -> None:
                sums = [e.variable(e.vector()) for _ in range(4)]
                with e.range(0, count * 4, 4) as place:
                    for number, total in enumerate(sums):
                        corner = e.read(corners + (place + number)).floats()
                        share = e.broadcast(e.read(shares + (place + number)))
                        total.value = e.fma(e.load(corner + c, mask), share, total.value)
                top, lower = (sums[one].value + sums[one + 1].value for one in (0, 2))
                before = e.select(first == 0, e.vector(), e.load(target + c, mask))
                e.store(before + (top + lower), target + c, mask)

            each_vector(e, 0, a.c, mix)


def _emit_image(e: Emitter, a: Args, point: Value, number: Value) -> _Image:
    first, h, w, *zooms = (e.read(point + word) for word in range(_WORDS))
    begin = a.x.floats() + (first + number * h * w) * a.x_pixel
    return _Image(begin, h, w, *(e.float_of_bits(zoom) for zoom in zooms))


def _emit_corners(e: Emitter, a: Args, image: _Image, grid: Value) -> list[tuple[Value, Value]]:
    """The four pixels around the place that `grid` names, with their shares in it."""
    left, right_share = _place(e, a, e.read(grid), image.zoom_w, image.w)
    top, lower_share = _place(e, a, e.read(grid + 1), image.zoom_h, image.h)
    rows = ((top, 1.0 - lower_share), (top + 1, lower_share))
    columns = ((left, 1.0 - right_share), (left + 1, right_share))
    return [
        (_corner(e, a, image, row, column), vertical * horizontal)
        for row, vertical in rows
        for column, horizontal in columns
    ]


def _place(e: Emitter, a: Args, given: Value, zoom: Value, size: Value) -> tuple[Value, Value]:
    """The pixel in front of a place along a side, and the share of the pixel behind it."""
    place = (given + 1.0) * zoom - e.float_of_bits(a.offset)
    # Two pixels in front of the image, neither the place nor the pixel behind it is inside.
    first, last = e.to_float(-2 * a.outside), e.to_float(size - 1 + a.outside)
    bounded = e.min(e.max(place, first), last)
    whole = e.whole(bounded)
    whole = e.select(e.to_float(whole) > bounded, whole - 1, whole)
    # At the border what is no number is the first pixel. Else what is not finite has no place.
    placed = (a.outside == 0) | (place - place == 0.0)
    return whole, e.select(placed, bounded, e.f32(float("nan"))) - e.to_float(whole)


def _corner(e: Emitter, a: Args, image: _Image, row: Value, column: Value) -> Value:
    inside = (row >= 0) & (row < image.h) & (column >= 0) & (column < image.w)
    found = image.begin + (row * image.w + column) * a.x_pixel
    return e.select(inside, found, a.zeros.floats())


SAMPLE = Kernel(
    "sample",
    (
        *("x", "x_pixel", "other", "other_pixel", "y", "y_pixel", "c", "h", "w", "pixels", "area"),
        *("zoom_h", "zoom_w", "offset", "outside", "zeros"),
    ),
    _emit_sample,
)
WEIGHTED_SAMPLES = Kernel(
    "weighted_samples",
    (
        *("x", "x_pixel", "other", "other_pixel", "factor", "factor_pixel", "y", "y_pixel"),
        *("c", "pixels", "area", "points", "places", "offset", "outside", "zeros"),
    ),
    _emit_weighted_samples,
)
