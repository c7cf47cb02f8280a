"""Pooling, means and resizing of images and volumes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ...kernels.layers.pooling import adaptive_avgpool_step, global_mean_step
from ...kernels.programs.builder import Buffer, Builder
from ...kernels.tape.steps import View
from ..implementation import Implementation
from .calls import Lower, OperatorCall, computing
from .pixels import nearest
from .placing import of_pixels as place_pixels
from .windows import ARGUMENTS, Given, Make, is_neutral, of_frames, of_pixels, resize

_Window = Callable[[Given], "Make | None"]


def of_function(make: _Window) -> Lower:
    """Lower a function of torch's whose arguments `make` understands."""
    return lambda call: _windows(call, make, call.settings(ARGUMENTS[make]))


def of_module(make: _Window) -> Lower:
    """Lower a module whose attributes have the names of the function's arguments."""
    return lambda call: _windows(call, make, vars(call.module))


def _windows(call: OperatorCall, make: _Window, given: Given | None) -> Implementation | None:
    if given is None:
        return None
    shape, wanted = call.seen(0).shape, call.out.shape
    if len(shape) != 5:
        return call.on_images(make(given))
    if make is resize and (placed := place_pixels(call, nearest(given, shape, wanted))):
        return placed
    return _of_volumes(call, make, given) if len(wanted) == 5 else None


def _of_volumes(call: OperatorCall, make: _Window, given: Given) -> Implementation | None:
    """Windows over each frame, and then over the frames of each pixel."""
    n, c, d, h, w = call.seen(0).shape
    *_, deep, high, wide = call.out.shape
    frames, pixels = of_frames(given), of_pixels(given)
    resized = (h, w) != (high, wide) or not is_neutral(frames)
    # What the first step resizes, the second leaves alone; torch does both at once.
    one, two = make(frames), make({**pixels, "column": resized})
    if one is None or two is None:
        return None
    steps = [
        (one, frames, (n * d, h, w), (n * d, high, wide)),
        (two, pixels, (n, d, high * wide), (n, deep, high * wide)),
    ]
    needed = [s for s in steps if s[2] != s[3] or not is_neutral(s[1])] or steps[:1]

    def emit(builder: Builder, constants: None, x: Buffer) -> Buffer:
        for number, (step, _, before, after) in enumerate(needed, 1):
            depth = d if number < len(needed) else deep
            y = builder.buffer((n, c, depth, high, wide))
            builder.add(partial(_reshaped, step, before, after), x, y)
            x = y
        return x

    return computing(emit)


def _reshaped(
    make: Make, before: tuple[int, int, int], after: tuple[int, int, int], x: View, y: View
) -> Any:
    """The steps of `make` on the same pixels, counted as images of other sizes."""
    return make(x.as_images(*before), y.as_images(*after))


def adaptive_pool(call: OperatorCall) -> Implementation | None:
    x, out = call.seen(0).shape, call.out.shape
    if len(x) != 5 or len(out) != 5:
        return call.on_images(adaptive_avgpool_step)
    if out[2:] == (1, 1, 1):
        return call.steps(global_mean_step)
    # The parts are even in each direction, so the mean of the means is the mean.
    return _of_volumes(call, lambda given: adaptive_avgpool_step, {})


def mean(call: OperatorCall) -> Implementation | None:
    """The mean over all pixels of an image or a volume."""
    given = call.settings(("input", "dim", "keepdim")) or {}
    dims, rank = given.get("dim"), len(call.seen(0).shape)
    if not isinstance(dims, (tuple, list)) or rank not in (4, 5):
        return None
    over_all = sorted(d % rank for d in dims) == [*range(2, rank)]
    return call.steps(global_mean_step) if over_all else None
