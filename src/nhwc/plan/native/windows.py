"""Pooling and resizing, from the arguments of torch's functions and modules to our steps.

A window over a volume is one over each frame, then one over the frames of each pixel: the largest
of the largest is the largest, and so with means and with resizing. `of_frames` and `of_pixels` are
what the arguments say of the one and of the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ...graph.modules.mended import Pixel
from ...kernels.layers.pooling import avgpool_step, maxpool_step
from ...kernels.layers.resize import bilinear_step, nearest_step

Given = dict[str, Any]
"""The arguments of a call, or the attributes of a module, by name."""

Make = Callable[..., Any]


def max_pool(given: Given) -> Make | None:
    if given.get("return_indices"):
        return None
    window = {**_window(given), "dilation": _pair(given.get("dilation", 1))}
    return lambda x, y: maxpool_step(x, y, **window)


def average_pool(given: Given) -> Make:
    window, divisor = _window(given), given.get("divisor_override")
    padded = given.get("count_include_pad", True)
    return lambda x, y: avgpool_step(x, y, **window, count_include_pad=padded, divisor=divisor)


def resize(given: Given) -> Make | None:
    """Resize to the size of the result, by the factor that was asked for, if one was."""
    factor = None if given.get("recompute_scale_factor") else given.get("scale_factor")
    factors = factor if isinstance(factor, (tuple, list)) else (factor, factor)
    if given.get("antialias"):
        return None
    scale = None if factor is None else (float(factors[0]), float(factors[-1]))
    mode, signal = given.get("mode", "nearest"), bool(given.get("signal"))
    if mode in ("nearest", "nearest-exact"):
        exact = mode == "nearest-exact"
        # torch ignores some factors of images, and none of signals.
        even = not exact and not signal
        return lambda x, y: nearest_step(x, y, scale=scale, exact=exact, even=even)
    align = bool(given.get("align_corners"))
    if mode in ("bilinear", "trilinear"):
        still = (signal, bool(given.get("column")))
        return lambda x, y: bilinear_step(x, y, align_corners=align, scale=scale, still=still)
    return None


_NEUTRAL = {"kernel_size": 1, "stride": 1, "padding": 0, "dilation": 1, "scale_factor": 1.0}
"""The arguments that have a number for each side, as those say it that do nothing along one."""


def of_frames(given: Given) -> Given:
    """The arguments for each frame of a volume, an image.

    >>> of_frames({"kernel_size": 2, "padding": (1, 0, 0)})["padding"]
    (0, 0)
    """
    every = {name: sides[1:] for name, sides in _sides(given).items()}
    # The second of two steps divides.
    return {**given, **every, **({"divisor_override": 1} if given.get("divisor_override") else {})}


def of_pixels(given: Given) -> Given:
    """The arguments for the frames of each pixel, which are a column of a wide image.

    >>> of_pixels({"kernel_size": 2, "padding": (1, 0, 0)})["kernel_size"]
    (2, 1)
    """
    first = {name: (sides[0], _NEUTRAL[name]) for name, sides in _sides(given).items()}
    return {**given, **first}


def of_row(given: Given) -> Given:
    """The arguments for signals as those for images of one row each.

    >>> of_row({"kernel_size": (3,), "padding": 1})["kernel_size"]
    (1, 3)
    """
    mode = {"mode": "bilinear"} if given.get("mode") == "linear" else {}
    last = {name: (_NEUTRAL[name], sides[-1]) for name, sides in _sides(given).items()}
    return {**given, **last, **mode, "signal": True}


def is_neutral(given: Given) -> bool:
    """Whether a window of `of_frames` or `of_pixels` leaves everything as it is."""
    return all(side == _NEUTRAL[name] for name, sides in _sides(given).items() for side in sides)


def _sides(given: Given) -> dict[str, tuple[Any, ...]]:
    found = {}
    for name in _NEUTRAL:
        value = given.get(name)
        if value is None and name == "stride":
            value = given.get("kernel_size")
        if value is not None:
            values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
            found[name] = values * 3 if len(values) == 1 else values
    return found


def _window(given: Given) -> dict[str, Any]:
    size = _pair(given["kernel_size"])
    stride, padding = given.get("stride") or size, given.get("padding", 0)
    return {"size": size, "stride": _pair(stride), "padding": _pair(padding)}


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    values = tuple(value)
    return (values[0], values[0]) if len(values) == 1 else (values[0], values[1])


MODULES: dict[type[nn.Module], Callable[[Given], Make | None]] = {
    nn.MaxPool2d: max_pool,
    nn.MaxPool3d: max_pool,
    nn.AvgPool2d: average_pool,
    nn.AvgPool3d: average_pool,
    nn.Upsample: resize,
    Pixel: resize,
}
ARGUMENTS: dict[Callable[[Given], Make | None], tuple[str, ...]] = {
    max_pool: (
        *("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode"),
        "return_indices",
    ),
    average_pool: (
        *("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad"),
        "divisor_override",
    ),
    resize: (
        *("input", "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor"),
        "antialias",
    ),
}
"""The arguments of torch's functions, in their order."""
