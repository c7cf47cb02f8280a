"""A convolution and the 2x2 max pooling that alone reads it, as one step.

A convolution has the pixels of a window in registers, or has just stored them. Pooled there, most
of what it computes is never written, and none of it is read again.
"""

from __future__ import annotations

from ..language.compiler import Args
from ..language.values import Value
from ..language.vectors import Emitter

POOL = "pool"
"""The field of a kernel that can pool what it computes: 1 if it should."""


def emit_pooled(e: Emitter, a: Args, count: Value) -> Value:
    """How many rows or columns a kernel stores that computes `count`, and may pool."""
    return e.select(a.pool != 0, count // 2, count)
