"""The activations an epilogue can apply, and their code on vectors of float32.

Kernels take the activation as a number at run time, so one compiled kernel serves them all. The
piecewise ones cost a few instructions in line; the others share a function per module.
NaN stays NaN, as in torch.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir

from ...errors import InputError
from ..language.values import INT, WORD, Value
from ..language.vectors import Emitter


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
    if name.upper() not in Activation.__members__:
        return None
    return Activation[name.upper()], (*numbers, 0.0)[0]


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
        keep([_hardsigmoid(e, value) * e.select(swish, value, one) for value in values])

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


def _hardsigmoid(e: Emitter, x: Value) -> Value:
    return e.min(even(e, 6.0), e.max(even(e, 0.0), x + 3.0)) * even(e, 1 / 6)


def _hardswish(e: Emitter, x: Value) -> Value:
    return x * _hardsigmoid(e, x)


def _sigmoid(e: Emitter, x: Value) -> Value:
    return 1.0 / (emit_exp(e, -x) + 1.0)


def _silu(e: Emitter, x: Value) -> Value:
    return x / (emit_exp(e, -x) + 1.0)


def _gelu(e: Emitter, x: Value) -> Value:
    """x * (1 - erfc(z) / 2) for x >= 0 and x * erfc(z) / 2 below, with z = |x| / sqrt(2).

    erfc(z) = t * P(t) * exp(-z * z) with t = 1 / (1 + 0.3 z): P was fitted to a relative error of
    2e-8, so the tail of negative inputs keeps its digits, which 1 + erf(x) would cancel.
    """
    negative = x < 0.0
    z = e.select(negative, -x, x) * even(e, 0.5**0.5)
    t = 1.0 / e.fma(z, even(e, 0.3), even(e, 1.0))
    tail = polynomial(e, t, _ERFC) * t * 0.5 * emit_exp(e, -(x * 0.5 * x))
    return x * e.select(negative, tail, 1.0 - tail)


def _gelu_tanh(e: Emitter, x: Value) -> Value:
    """x / 2 * (1 + tanh(z)) = x * sigmoid(2 z) with z = sqrt(2 / pi) * (x + 0.044715 x**3)."""
    doubled = x * e.fma(x * x, even(e, 2 * 0.044715 * _ROOT), even(e, 2 * _ROOT))
    return x / (emit_exp(e, -doubled) + 1.0)


def _tanh(e: Emitter, x: Value) -> Value:
    """1 - 2 / (exp(2 |x|) + 1), and near zero, where that cancels, an odd polynomial."""
    negative = x < 0.0
    size = e.select(negative, -x, x)
    far = 1.0 - even(e, 2.0) / (emit_exp(e, size * 2.0) + 1.0)
    square = x * x
    near = e.fma(polynomial(e, square, _TANH) * square, x, x)
    return e.select(size < 0.625, near, e.select(negative, -far, far))


def _mish(e: Emitter, x: Value) -> Value:
    """x * tanh(log(1 + exp(x))) = x * n / (n + 2) with n = exp(x) * (exp(x) + 2)."""
    # From 20 on the quotient is 1; much further on n would overflow.
    power = emit_exp(e, e.min(even(e, 20.0), x))
    n = power * (power + 2.0)
    return x * (n / (n + 2.0))


def emit_exp(e: Emitter, x: Value) -> Value:
    """e to the x within two units in the last place, with infinity, zero and NaN where due."""
    whole = ir.VectorType(WORD, e.width)

    def words(number: int) -> ir.Constant:
        return ir.Constant(whole, [number] * e.width)

    bounded = e.min(even(e, 90.0), e.max(even(e, -105.0), x))
    # Adding 1.5 * 2**23 leaves the nearest integer in the low bits; no conversion, so a NaN
    # needs no care.
    shifted = e.fma(bounded, even(e, 1.4426950408889634), even(e, 12582912.0))
    integer = e.builder.sub(e.builder.bitcast(shifted.llvm, whole), words(0x4B400000))
    n = shifted - 12582912.0
    rest = e.fma(n, even(e, -0.693359375), bounded)
    rest = e.fma(n, even(e, 2.12194440e-4), rest)
    power = polynomial(e, rest, _EXP)
    # Two factors, as 2**n itself overflows and underflows a step before the product does.
    first = e.builder.ashr(integer, words(1))
    for part in (first, e.builder.sub(integer, first)):
        bits = e.builder.shl(e.builder.add(part, words(127)), words(23))
        power = power * Value(e, e.builder.bitcast(bits, e.vector_type))
    return power


def polynomial(e: Emitter, x: Value, coefficients: Sequence[float]) -> Value:
    """The polynomial with these coefficients, the constant one first."""
    result = even(e, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = e.fma(result, x, even(e, coefficient))
    return result


def even(e: Emitter, number: float) -> Value:
    """A vector of one number, which LLVM wants representable in float32."""
    return e.vector(ctypes.c_float(number).value)


_EXP = (
    1.0,
    1.0,
    0.49999993446440355,
    0.16666520624661374,
    0.041668388478371746,
    0.008368717892156034,
    0.001381457150836488,
)
_ERFC = (
    0.16918742463729214,
    0.17072363740681928,
    0.1482874247841287,
    0.2151029052720443,
    -0.09501849158538793,
    0.5481973215312267,
    -0.5126562131937884,
    0.48573066035096896,
    -0.129554688796529,
)
_TANH = (-0.333332819422, 0.133314422036, -0.0537397155531, 0.0206390887954, -0.00570498872745)
_ROOT = math.sqrt(2 / math.pi)
_SMOOTH: tuple[tuple[Activation, Callable[[Emitter, Value], Value]], ...] = (
    (Activation.HARDSWISH, _hardswish),
    (Activation.HARDSIGMOID, _hardsigmoid),
    (Activation.SIGMOID, _sigmoid),
    (Activation.SILU, _silu),
    (Activation.GELU, _gelu),
    (Activation.GELU_TANH, _gelu_tanh),
    (Activation.TANH, _tanh),
    (Activation.MISH, _mish),
)
