"""The mean and the deviation of a row of floats, in every lane of a vector."""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from ..language.loops import each_vector
from ..language.values import WORD, Value
from ..language.vectors import Emitter


def emit_moments(
    e: Emitter, row: Value, count: Value, eps: Value, centred: Value
) -> tuple[Value, Value]:
    """The mean of `count` floats in every lane, and the reciprocal of their deviation.

    Of floats that are nearly the same, what each lies beside the mean is in its last digits. So the
    mean of that is added to the mean: that of a constant is this constant. Where they are not
    `centred` the mean is zero, and the deviation is that from zero.
    """
    total, beside, squares = e.variable(0.0), e.variable(0.0), e.variable(0.0)
    every = e.broadcast(e.to_float(count))

    def add(c: Value, mask: Value | None) -> None:
        total.value = total.value + e.load(row + c, mask)

    with e.when(centred != 0):
        each_vector(e, 0, count, add)
    mean = across(e, total.value, lambda p, q: p + q) / every

    # The mean is taken first: a difference of large squares would lose the digits.
    def add_square(c: Value, mask: Value | None) -> None:
        apart = e.load(row + c, mask) - mean
        if mask is not None:
            apart = e.select(mask, apart, e.vector())
        beside.value = beside.value + apart
        squares.value = e.fma(apart, apart, squares.value)

    each_vector(e, 0, count, add_square)
    variance = across(e, squares.value, lambda p, q: p + q) / every
    more = across(e, beside.value, lambda p, q: p + q) / every
    more = e.select(centred != 0, more, e.vector())
    return mean + more, 1.0 / e.sqrt(variance + eps)


def across(e: Emitter, vector: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """The lanes of a vector combined into every lane, pairs first."""
    distance = e.width // 2
    while distance:
        lanes = [lane ^ distance for lane in range(e.width)]
        picks = ir.Constant(ir.VectorType(WORD, e.width), lanes)
        swapped = Value(e, e.builder.shuffle_vector(vector.llvm, vector.llvm, picks))
        vector = combine(vector, swapped)
        distance //= 2
    return vector
