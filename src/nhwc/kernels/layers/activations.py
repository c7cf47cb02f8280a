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
    name = "leaky_relu" if name == "prelu" else name
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
    return 1.0 / (emit_bounded_exp(e, -x) + 1.0)


def _silu(e: Emitter, x: Value) -> Value:
    return x / (emit_bounded_exp(e, -x) + 1.0)


def _gelu(e: Emitter, x: Value) -> Value:
    """x / 2 * (1 + erf(x / sqrt(2)))."""
    return x * 0.5 * _raised_curve(e, x, _ERF)


def _gelu_tanh(e: Emitter, x: Value) -> Value:
    """x / 2 * (1 + tanh(z)) with z = sqrt(2 / pi) * (x + 0.044715 x**3)."""
    z = x * e.fma(x * x, even(e, 0.044715 * _ROOT), even(e, _ROOT))
    return x * 0.5 * _raised_curve(e, z, _TANH)


def _tanh(e: Emitter, x: Value) -> Value:
    return _s_curve(e, x, _TANH)


def _mish(e: Emitter, x: Value) -> Value:
    """x * tanh(log(1 + exp(x))) = x * n / (n + 2) with n = exp(x) * (exp(x) + 2)."""
    # From 20 on the quotient is 1; much further on n would overflow.
    power = emit_bounded_exp(e, e.min(even(e, 20.0), x))
    n = power * (power + 2.0)
    return x * (n / (n + 2.0))


class _Curve(NamedTuple):
    """An odd function from -1 to 1 as x * P(x * x) / Q(x * x): coefficients, the constant first.

    From `flat` on it is 1 within float32.
    """

    above: Sequence[float]
    below: Sequence[float]
    flat: float


def _s_curve(e: Emitter, x: Value, curve: _Curve) -> Value:
    above, below = _parts(e, x, curve)
    return e.min(even(e, 1.0), e.max(even(e, -1.0), x * above / below))


def _raised_curve(e: Emitter, x: Value, curve: _Curve) -> Value:
    """1 + the curve, from 0 to 2, with one division."""
    above, below = _parts(e, x, curve)
    return e.min(even(e, 2.0), e.max(even(e, 0.0), e.fma(x, above, below) / below))


def _parts(e: Emitter, x: Value, curve: _Curve) -> tuple[Value, Value]:
    # With the square held there, the quotient goes on to grow with x: bounds must end it.
    square = e.min(even(e, curve.flat**2), x * x)
    return polynomial(e, square, curve.above), polynomial(e, square, curve.below)


def emit_exp(e: Emitter, x: Value) -> Value:
    """e to the x within two units in the last place, with infinity, zero and NaN where due."""
    power, integer = _reduced_exp(e, e.min(even(e, 90.0), e.max(even(e, -105.0), x)))
    # Two factors, as 2**n itself overflows and underflows a step before the product does.
    first = e.builder.ashr(integer, _words(e, 1))
    for part in (first, e.builder.sub(integer, first)):
        power = power * _power_of_two(e, part)
    return power


def emit_bounded_exp(e: Emitter, x: Value) -> Value:
    """`emit_exp` in fewer steps: zero below -87.7 and infinite above 88.3, a little early."""
    power, integer = _reduced_exp(e, e.min(even(e, 89.0), e.max(even(e, -88.0), x)))
    return power * _power_of_two(e, integer)


def _reduced_exp(e: Emitter, bounded: Value) -> tuple[Value, ir.Value]:
    """A number between 0.7 and 1.5, and how often to double it for e to the `bounded`."""
    # Adding 1.5 * 2**23 leaves the nearest integer in the low bits; no conversion, so a NaN
    # needs no care.
    shifted = e.fma(bounded, even(e, 1.4426950408889634), even(e, 12582912.0))
    kind = ir.VectorType(WORD, e.width)
    integer = e.builder.sub(e.builder.bitcast(shifted.llvm, kind), _words(e, 0x4B400000))
    n = shifted - 12582912.0
    rest = e.fma(n, even(e, -0.693359375), bounded)
    rest = e.fma(n, even(e, 2.12194440e-4), rest)
    return polynomial(e, rest, _EXP), integer


def _power_of_two(e: Emitter, integer: ir.Value) -> Value:
    """2 to the `integer`: its bits are the exponent of a float, 127 more than what it means."""
    bits = e.builder.shl(e.builder.add(integer, _words(e, 127)), _words(e, 23))
    return Value(e, e.builder.bitcast(bits, e.vector_type))


def _words(e: Emitter, number: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(WORD, e.width), [number] * e.width)


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
# Fitted to the least of the largest errors, 1.4e-8 of erf(x / sqrt(2)), 2.1e-8 of tanh for one.
_ERF = _Curve(
    (
        0.7978844692426466,
        0.06770558376681824,
        0.009354539730641149,
        0.00033765437098969795,
        1.2704261795819028e-05,
        4.549861944581289e-08,
    ),
    (
        1.0,
        0.25152228373289715,
        0.02864595560083609,
        0.001884453381032278,
        7.364800058173889e-05,
        1.197503267451094e-06,
    ),
    5.5,
)
_TANH = _Curve(
    (
        0.9999999794488208,
        0.13381024911140144,
        0.0034955872950640948,
        2.0609069606063875e-05,
        1.3354645296072707e-08,
    ),
    (
        1.0,
        0.4671434050182304,
        0.02587697895272566,
        0.0003285633503218904,
        7.776551392871539e-07,
    ),
    9.0,
)
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
