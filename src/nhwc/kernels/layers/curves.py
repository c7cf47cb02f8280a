"""Functions of vectors: the larger of two; exp, log, sigmoid, GELU and kin, by polynomials."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

from llvmlite import ir

from ..language.values import WORD, Value
from ..language.vectors import Emitter


def larger(e: Emitter, a: Value, b: Value) -> Value:
    """The larger number; NaN where either is."""
    return e.select(a != a, a, e.max(a, b))


def smaller(e: Emitter, a: Value, b: Value) -> Value:
    """The smaller number; NaN where either is."""
    return e.select(a != a, a, e.min(a, b))


def hardsigmoid(e: Emitter, x: Value) -> Value:
    return e.min(even(e, 6.0), e.max(even(e, 0.0), x + 3.0)) * even(e, 1 / 6)


def hardswish(e: Emitter, x: Value) -> Value:
    return x * hardsigmoid(e, x)


def sigmoid(e: Emitter, x: Value) -> Value:
    return 1.0 / (emit_bounded_exp(e, -x) + 1.0)


def silu(e: Emitter, x: Value) -> Value:
    return x / (emit_bounded_exp(e, -x) + 1.0)


def quick_gelu(e: Emitter, x: Value) -> Value:
    """x * sigmoid(1.702 x)."""
    return x / (emit_bounded_exp(e, x * even(e, -1.702)) + 1.0)


def squared_relu(e: Emitter, x: Value) -> Value:
    positive = e.max(even(e, 0.0), x)
    return positive * positive


def gelu(e: Emitter, x: Value) -> Value:
    """x / 2 * (1 + erf(x / sqrt(2)))."""
    return x * 0.5 * _raised_curve(e, x, _ERF)


def gelu_tanh(e: Emitter, x: Value) -> Value:
    """x / 2 * (1 + tanh(z)) with z = sqrt(2 / pi) * (x + 0.044715 x**3)."""
    z = x * e.fma(x * x, even(e, 0.044715 * _ROOT), even(e, _ROOT))
    return x * 0.5 * _raised_curve(e, z, _TANH)


def erf(e: Emitter, x: Value) -> Value:
    return _s_curve(e, x * even(e, math.sqrt(2)), _ERF)


def tanh(e: Emitter, x: Value) -> Value:
    return _s_curve(e, x, _TANH)


def mish(e: Emitter, x: Value) -> Value:
    """x * tanh(log(1 + exp(x))) = x * n / (n + 2) with n = exp(x) * (exp(x) + 2)."""
    # From 20 on the quotient is 1; much further on n would overflow.
    power = emit_bounded_exp(e, e.min(even(e, 20.0), x))
    n = power * (power + 2.0)
    return x * (n / (n + 2.0))


def elu(e: Emitter, x: Value) -> Value:
    return e.select(x < 0.0, _exp_less_one(e, x), x)


def selu(e: Emitter, x: Value) -> Value:
    below = _exp_less_one(e, x) * even(e, _SELU_SCALE * _SELU_ALPHA)
    return e.select(x < 0.0, below, x * even(e, _SELU_SCALE))


def softplus(e: Emitter, x: Value) -> Value:
    """log(1 + exp(x)) = max(x, 0) + log(1 + exp(-|x|)), the last by s = z / (2 + z)."""
    z = emit_bounded_exp(e, e.min(x, -x))
    s = z / (z + 2.0)
    return e.max(even(e, 0.0), x) + s * polynomial(e, s * s, _LOG_OF_QUOTIENT)


def _exp_less_one(e: Emitter, x: Value) -> Value:
    """exp(x) - 1 for x below zero, all digits right: 2 t / (1 - t) with t = tanh(x / 2)."""
    half = e.max(even(e, -_TANH.flat), x * 0.5)
    above, below = _parts(e, half, _TANH)
    t = half * above
    return (t + t) / (below - t)


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
    first = e.builder.ashr(integer, words(e, 1))
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
    integer = e.builder.sub(e.builder.bitcast(shifted.llvm, kind), words(e, 0x4B400000))
    n = shifted - 12582912.0
    rest = e.fma(n, even(e, -0.693359375), bounded)
    rest = e.fma(n, even(e, 2.12194440e-4), rest)
    return polynomial(e, rest, _EXP), integer


def _power_of_two(e: Emitter, integer: ir.Value) -> Value:
    """2 to the `integer`: its bits are the exponent of a float, 127 more than what it means."""
    bits = e.builder.shl(e.builder.add(integer, words(e, 127)), words(e, 23))
    return Value(e, e.builder.bitcast(bits, e.vector_type))


def emit_log(e: Emitter, x: Value) -> Value:
    """log(m) + n * log(2) for x = m * 2**n, with m between the square roots of 1/2 and of 2."""
    tiny = x < even(e, 2.0**-126)
    whole = words(e, _ROOT_OF_HALF)
    bits = e.builder.bitcast(e.select(tiny, x * even(e, 2.0**23), x).llvm, whole.type)
    bits = e.builder.sub(bits, whole)
    power = e.builder.sitofp(e.builder.ashr(bits, words(e, 23)), e.vector_type)
    n = Value(e, power) - e.select(tiny, even(e, 23.0), e.vector())
    bits = e.builder.add(e.builder.and_(bits, words(e, 0x7FFFFF)), whole)
    m = Value(e, e.builder.bitcast(bits, e.vector_type)) - 1.0
    square = m * m
    rest = polynomial(e, m, _LOG) * m * square
    rest = e.fma(n, even(e, -2.12194440e-4), rest) - square * 0.5
    found = e.fma(n, even(e, 0.693359375), m + rest)
    found = e.select(x < even(e, float("inf")), found, x)
    found = e.select(x > 0.0, found, even(e, float("nan")))
    return e.select(x == 0.0, even(e, -float("inf")), found)


def words(e: Emitter, number: int) -> ir.Constant:
    """A vector of one 32-bit integer."""
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
_ROOT_OF_HALF = 0x3F3504F3
"""The bits of the square root of 1/2."""
_LOG = (
    3.3333331174e-1,
    -2.4999993993e-1,
    2.0000714765e-1,
    -1.6668057665e-1,
    1.4249322787e-1,
    -1.2420140846e-1,
    1.1676998740e-1,
    -1.1514610310e-1,
    7.0376836292e-2,
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
_SELU_SCALE, _SELU_ALPHA = 1.0507009873554805, 1.6732632423543772
_LOG_OF_QUOTIENT = tuple(2 / (2 * power + 1) for power in range(8))
"""log((1 + s) / (1 - s)) / s as a polynomial in s * s, for s up to 1/3."""
