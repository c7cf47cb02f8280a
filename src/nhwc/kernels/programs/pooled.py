"""Steps in which convolutions pool what nothing but a 2x2 max pooling would read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..convolutions.pooled import POOL
from ..layers.pooling import MAXPOOL
from ..tape.steps import Step, View

_PLAIN = {
    **dict.fromkeys(("r", "s", "stride_h", "stride_w"), 2),
    **dict.fromkeys(("dilation_h", "dilation_w"), 1),
    **dict.fromkeys(("pad_h", "pad_w"), 0),
    "residual": None,
}


def pooled(steps: Sequence[Step], outputs: Sequence[View]) -> tuple[Step, ...]:
    """`steps`, in which convolutions pool what nothing but a pooling reads."""
    found = list(steps)
    kept = {id(view.buffer) for view in outputs}
    for pooling in steps:
        if pooling.kernel.name != MAXPOOL.name or not _is_plain(pooling.given):
            continue
        x, y = pooling.given["x"], pooling.given["y"]
        users = [s for s in found if s is not pooling and _uses_of(s, x)]
        if id(x.buffer) in kept or not users or not all(_can_pool(user, x) for user in users):
            continue
        makers = {id(user) for user in users}
        found = [
            _pooling(step, y) if id(step) in makers else step
            for step in found
            if step is not pooling
        ]
    return tuple(found)


def _is_plain(given: dict[str, Any]) -> bool:
    """Whether a pooling has the common window, and leaves out what does not fill one."""
    if any(given[name] != wanted for name, wanted in _PLAIN.items()):
        return False
    (_, _, h, w), (_, _, out_h, out_w) = given["x"].shape, given["y"].shape
    return (out_h, out_w) == (h // 2, w // 2)


def _uses_of(step: Step, x: View) -> int:
    """How many of the arguments lie in the buffer of `x`."""
    return sum(use.item is x.buffer for use in step.uses)


def _can_pool(step: Step, x: View) -> bool:
    """Whether `step` can pool, writes just what the pooling reads, and reads nothing of it."""
    given = step.given
    able = given.get(POOL) == 0 and given["residual"] is None
    return able and given["y"] == x and _uses_of(step, x) == 1


def _pooling(step: Step, y: View) -> Step:
    return step.but(y=y, y_pixel=y.pixel, **{POOL: 1})
