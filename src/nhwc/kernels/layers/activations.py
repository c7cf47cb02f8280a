"""The activations an epilogue can apply, and their code on vectors of float32.

Kernels take the activation as a number at run time, so one compiled kernel serves them all. The
piecewise ones cost a few instructions in line; the others share a function per module.
NaN stays NaN, as in torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir

from ...errors import InputError
from ..language.values import INT, Value
from ..language.vectors import Emitter
from . import curves
from .curves import even


class Activation(IntEnum):
    """The number by which a kernel knows the activation that it applies before it stores.

    >>> Activation["RELU"]
    <Activation.RELU: 1>
    """

    NONE = 0
    RELU = 1
    RELU6 = 2
    AT_LEAST = 3
    LEAKY_RELU = 4
    HARDSWISH = 5
    HARDSIGMOID = 6
    SIGMOID = 7
    SILU = 8
    GELU = 9
    GELU_TANH = 10
    TANH = 11
    MISH = 12
    ELU = 13
    SELU = 14
    SOFTPLUS = 15
    QUICK_GELU = 16
    SQUARED_RELU = 17


LAST_CLAMP = Activation.AT_LEAST
"""Activations up to this one are nothing but bounds, which a product applies to its sums."""


def named(name: str) -> Activation:
    """The activation of this name, as torch's operators are given it.

    >>> named("gelu_tanh")
    <Activation.GELU_TANH: 10>
    """
    if name.upper() not in Activation.__members__:
        known = ", ".join(one.name.lower() for one in Activation)
        raise InputError(f"activation {name!r} is not known. Known: {known}.")
    return Activation[name.upper()]


def code_of(name: str, numbers: Sequence[float] = ()) -> tuple[Activation, float] | None:
    """The number of an activation of torch's, and its slope, as kernels are given them.

    None for one that they lack: of all hardtanhs they have the one that is relu6, and those with a
    lower bound alone, which stands in the place of the slope.

    >>> code_of("hardtanh", (0.0, 6.0)), code_of("leaky_relu", (0.2,)), code_of("hardtanh", (0, 1))
    ((<Activation.RELU6: 2>, 0.0), (<Activation.LEAKY_RELU: 4>, 0.2), None)
    >>> code_of("hardtanh", (-0.5, math.inf))
    (<Activation.AT_LEAST: 3>, -0.5)
    """
    if name == "hardtanh":
        if tuple(numbers) == (0.0, 6.0):
            return Activation.RELU6, 0.0
        return (Activation.AT_LEAST, numbers[0]) if numbers[1] == math.inf else None
    name = _SAME.get(name, name)
    if name.upper() not in Activation.__members__:
        return None
    return Activation[name.upper()], (*numbers, 0.0)[0]


_SAME = {"prelu": "leaky_relu", "erf_gelu": "gelu", "tanh_gelu": "gelu_tanh"}
"""Activations that have another's code: what tells them apart is how torch computes them."""


def clamp(activation: Activation, slope: float = 0.0) -> tuple[float, float]:
    """The bounds that a matrix product applies; none where the activation is more than that."""
    lows = {Activation.RELU: 0.0, Activation.RELU6: 0.0, Activation.AT_LEAST: float(slope)}
    high = 6.0 if activation is Activation.RELU6 else math.inf
    return lows.get(activation, -math.inf), high


class Stored(NamedTuple):
    """Channels of neighbouring pixels, just stored: from `start` on, `pixel` floats apart."""

    start: Value
    pixel: Any
    pixels: Value
    channels: Value


def emit_activation(e: Emitter, value: Value, code: Value, slope: Value) -> Value:
    """The activation `code` of one vector; `slope` is leaky relu's, or a lower bound, a float."""
    return emit_activations(e, [value], code, slope)[0]


def emit_activations(e: Emitter, values: Sequence[Value], code: Value, slope: Value) -> list[Value]:
    """The activation of several vectors, with one branch for all of them."""
    results = [e.variable(0.0) for _ in values]

    def keep(made: Sequence[Value]) -> None:
        for variable, one in zip(results, made, strict=True):
            variable.value = one

    def curved() -> None:
        pairs = (values[first : first + 2] for first in range(0, len(values), 2))
        keep([one for pair in pairs for one in _curved(e, pair, code)])

    def hard() -> None:
        swish = code == int(Activation.HARDSWISH)
        one = even(e, 1.0)
        keep([curves.hardsigmoid(e, value) * e.select(swish, value, one) for value in values])

    def leaky() -> None:
        factor = e.broadcast(slope)
        keep([e.select(value < 0.0, value * factor, value) for value in values])

    def bounded() -> None:
        low = e.broadcast(slope)
        keep([e.max(low, value) for value in values])

    e.branch(
        code <= int(Activation.RELU6),
        lambda: keep(_clamped(e, values, code)),
        lambda: e.branch(
            code >= int(Activation.SIGMOID),
            curved,
            lambda: e.branch(
                code >= int(Activation.HARDSWISH),
                hard,
                lambda: e.branch(code == int(Activation.LEAKY_RELU), leaky, bounded),
            ),
        ),
    )
    return [variable.value for variable in results]


def emit_in_pairs(e: Emitter, tile: Stored, code: Value) -> Value:
    """Apply an activation of more than two pieces in place; return how many channels it did.

    It does pairs of vectors, with one jump for the whole tile: the chain of operations on one
    vector is long, and two fill the time that each waits. What is left is the caller's, and of any
    other activation that is all.
    """
    pair = 2 * e.width
    done = e.variable(0)

    def apply(emit: Callable[[Emitter, Value], Value]) -> None:
        done.value = tile.channels // pair * pair
        with e.range(0, tile.pixels) as i, e.range(0, done.value, pair) as channel:
            first = tile.start + (i * tile.pixel + channel)
            places = [first, first + e.width]
            made = [emit(e, e.load(place)) for place in places]
            for place, value in zip(places, made, strict=True):
                e.store(value, place)

    e.switch(code, {int(one): partial(apply, emit) for one, emit in _SMOOTH})
    return done.value


def _clamped(e: Emitter, values: Sequence[Value], code: Value) -> list[Value]:
    """None, relu and relu6 as one formula, of two instructions."""
    infinity = e.f32(float("inf"))
    relu6 = code == int(Activation.RELU6)
    clipped = relu6 | (code == int(Activation.RELU))
    low = e.broadcast(e.select(clipped, e.f32(0.0), e.f32(float("-inf"))))
    high = e.broadcast(e.select(relu6, e.f32(6.0), infinity))
    return [e.min(high, e.max(low, value)) for value in values]


def _curved(e: Emitter, values: Sequence[Value], code: Value) -> list[Value]:
    """A call of the function of this module for activations of curves, of so many vectors."""
    count, name = len(values), f"nhwc_curved{len(values)}"
    function = e.module.globals.get(name)
    if function is None:
        kind = ir.LiteralStructType([e.vector_type] * count)
        given = [*[e.vector_type] * count, INT]
        function = ir.Function(e.module, ir.FunctionType(kind, given), name)
        function.linkage = "internal"
        function.attributes.add("noinline")
        _emit_curved(e, function)
    made = e.builder.call(function, [value.llvm for value in (*values, code)])
    return [Value(e, e.builder.extract_value(made, number)) for number in range(count)]


def _emit_curved(e: Emitter, function: ir.Function) -> None:
    inner = Emitter(e.isa, e.module, ir.IRBuilder(function.append_basic_block("entry")))
    *values, code = (Value(inner, argument) for argument in function.args)

    def give(made: Sequence[Value]) -> None:
        found = ir.Constant(function.ftype.return_type, ir.Undefined)
        for number, one in enumerate(made):
            found = inner.builder.insert_value(found, one.llvm, number)
        inner.builder.ret(found)

    default = function.append_basic_block("none")
    jump = inner.builder.switch(code.llvm, default)
    for activation, emit in _SMOOTH:
        block = function.append_basic_block(activation.name.lower())
        jump.add_case(ir.Constant(INT, int(activation)), block)
        inner.builder.position_at_end(block)
        give([emit(inner, value) for value in values])
    inner.builder.position_at_end(default)
    give(values)


_SMOOTH: tuple[tuple[Activation, Callable[[Emitter, Value], Value]], ...] = (
    (Activation.HARDSWISH, curves.hardswish),
    (Activation.HARDSIGMOID, curves.hardsigmoid),
    (Activation.SIGMOID, curves.sigmoid),
    (Activation.SILU, curves.silu),
    (Activation.GELU, curves.gelu),
    (Activation.GELU_TANH, curves.gelu_tanh),
    (Activation.TANH, curves.tanh),
    (Activation.MISH, curves.mish),
    (Activation.ELU, curves.elu),
    (Activation.SELU, curves.selu),
    (Activation.SOFTPLUS, curves.softplus),
    (Activation.QUICK_GELU, curves.quick_gelu),
    (Activation.SQUARED_RELU, curves.squared_relu),
)
