"""A convolution and the 2x2 max pooling that alone reads it, as one step.

A convolution has the pixels of a window in registers, or has just stored them. Pooled there, most
of what it computes is never written, and none of it is read again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from .pooling import MAXPOOL
from .steps import Step, View
from .values import Value
from .vectors import Emitter

POOL = "pool"
"""The field of a kernel that can pool what it computes: 1 if it should."""

_PLAIN = {
    **dict.fromkeys(("kh", "kw", "stride_h", "stride_w"), 2),
    **dict.fromkeys(("dilation_h", "dilation_w"), 1),
    **dict.fromkeys(("top", "left"), 0),
    "residual": None,
}


def pooled(steps: Sequence[Step], outputs: Sequence[View]) -> tuple[Step, ...]:
    """`steps`, in which convolutions pool what nothing but a pooling reads."""
    found = list(steps)
    kept = {id(view.buffer) for view in outputs}
    for pooling in steps:
        given = _given(pooling)
        if pooling.kernel.name != MAXPOOL.name or not _is_plain(given):
            continue
        x, y = given["x"], given["y"]
        users = [s for s in found if s is not pooling and _uses(s, x.buffer)]
        if id(x.buffer) in kept or not users or not all(_can_pool(user, x) for user in users):
            continue
        makers = {id(user) for user in users}
        found = [
            _pooling(step, y) if id(step) in makers else step
            for step in found
            if step is not pooling
        ]
    return tuple(found)


def emit_larger(e: Emitter, one: Value, other: Value) -> Value:
    """The larger, lane by lane; not a number where either is none."""
    return e.select(one == one, e.max(one, other), one)


def _given(step: Step) -> dict[str, Any]:
    return dict(zip(step.kernel.fields, step.args, strict=True))


def _is_plain(given: dict[str, Any]) -> bool:
    """Whether a pooling has the common window, and leaves out what does not fill one."""
    if any(given[name] != wanted for name, wanted in _PLAIN.items()):
        return False
    (_, _, h, w), (_, _, ho, wo) = given["x"].shape, given["y"].shape
    return (ho, wo) == (h // 2, w // 2)


def _uses(step: Step, buffer: object) -> bool:
    return any(isinstance(arg, View) and arg.buffer is buffer for arg in step.args)


def _can_pool(step: Step, x: View) -> bool:
    """Whether `step` can, and writes just what the pooling reads, and reads nothing of it."""
    given = _given(step)
    if given.get(POOL) != 0 or given["residual"] is not None or given["y"] != x:
        return False
    views = [argument for argument in step.args if isinstance(argument, View)]
    return sum(view.buffer is x.buffer for view in views) == 1


def _pooling(step: Step, y: View) -> Step:
    given = _given(step)
    pixel = "y_pixel" if "y_pixel" in given else "ypixel"
    return replace(step, args=tuple((given | {"y": y, pixel: y.pixel, POOL: 1}).values()))
