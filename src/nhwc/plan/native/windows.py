"""Pooling and resizing, from the arguments of torch's functions and modules to our steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn

from ...graph.mended import Pixel
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
    if given.get("antialias") or any(isinstance(one, fx.Node) for one in factors):
        return None
    scale = None if factor is None else (float(factors[0]), float(factors[-1]))
    mode = given.get("mode", "nearest")
    if mode == "nearest":
        return lambda x, y: nearest_step(x, y, scale=scale)
    align = bool(given.get("align_corners"))
    if mode == "bilinear":
        return lambda x, y: bilinear_step(x, y, align_corners=align, scale=scale)
    return None


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
    nn.AvgPool2d: average_pool,
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
