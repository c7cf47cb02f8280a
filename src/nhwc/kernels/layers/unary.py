"""Functions of one number: bounds, roots, the exponential and the logarithm.

Heads compute with them what they say of boxes: `exp` of a size, the inverse of a sigmoid.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from llvmlite import ir

from ..language.compiler import Args, Kernel
from ..language.loops import each_vector, emit_runs
from ..language.values import WORD, Value
from ..language.vectors import Emitter
from ..tape.steps import Argument, Step, View, pixelwise, step
from .curves import emit_exp, even, polynomial

_FIELDS = ("x", "x_pixel", "pixels", "c", "y", "y_pixel")


def unary_step(x: View, y: View, *, kind: str) -> Step:
    """A function of each number: one of UNARY."""
    return step(UNARY[kind], **_pixels(x, y))


def clamp_step(x: View, y: View, *, low: float, high: float) -> Step:
    """Each number within bounds, of which `high` is the stronger; NaN stays NaN."""
    return step(CLAMP, **_pixels(x, y), low=float(low), high=float(high))


def _pixels(x: View, y: View) -> dict[str, Argument]:
    return {**pixelwise(x, y), "y": y, "y_pixel": y.pixel}


def _emit(
    e: Emitter,
    a: Args,
    thread: Value,
    threads: Value,
    *,
    of: Callable[[Emitter, Args, Value], Value],
) -> None:
    begin, end = e.share(a.pixels, thread, threads)
    pixels, c = emit_runs(e, end - begin, a.c, a.x_pixel, a.y_pixel)
    with e.range(0, pixels) as i:
        pixel = begin + i
        source, target = a.x.floats() + pixel * a.x_pixel, a.y.floats() + pixel * a.y_pixel

        def channels(channel: Value, mask: Value | None) -> None:
            e.store(of(e, a, e.load(source + channel, mask)), target + channel, mask)

        each_vector(e, 0, c, channels)


def _clamp(e: Emitter, a: Args, value: Value) -> Value:
    low, high = (e.broadcast(e.float_of_bits(bound)) for bound in (a.low, a.high))
    value = e.select(value < low, low, value)
    return e.select(value > high, high, value)


def _log(e: Emitter, a: Args, x: Value) -> Value:
    """log(m) + n * log(2) for x = m * 2**n, with m between the square roots of 1/2 and of 2."""
    whole = ir.VectorType(WORD, e.width)

    def words(number: int) -> ir.Constant:
        return ir.Constant(whole, [number] * e.width)

    tiny = x < even(e, 2.0**-126)
    bits = e.builder.bitcast(e.select(tiny, x * even(e, 2.0**23), x).llvm, whole)
    bits = e.builder.sub(bits, words(_ROOT_OF_HALF))
    power = e.builder.sitofp(e.builder.ashr(bits, words(23)), e.vector_type)
    n = Value(e, power) - e.select(tiny, even(e, 23.0), e.vector())
    bits = e.builder.add(e.builder.and_(bits, words(0x7FFFFF)), words(_ROOT_OF_HALF))
    m = Value(e, e.builder.bitcast(bits, e.vector_type)) - 1.0
    square = m * m
    rest = polynomial(e, m, _LOG) * m * square
    rest = e.fma(n, even(e, -2.12194440e-4), rest) - square * 0.5
    found = e.fma(n, even(e, 0.693359375), m + rest)
    found = e.select(x < even(e, float("inf")), found, x)
    found = e.select(x > 0.0, found, even(e, float("nan")))
    return e.select(x == 0.0, even(e, -float("inf")), found)


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
_FUNCTIONS: dict[str, Callable[[Emitter, Args, Value], Value]] = {
    "abs": lambda e, a, x: e.select(x <= 0.0, 0.0 - x, x),
    "exp": lambda e, a, x: emit_exp(e, x),
    "log": _log,
    "reciprocal": lambda e, a, x: 1.0 / x,
    "rsqrt": lambda e, a, x: 1.0 / e.sqrt(x),
    "sqrt": lambda e, a, x: e.sqrt(x),
}

UNARY = {name: Kernel(name, _FIELDS, partial(_emit, of=of)) for name, of in _FUNCTIONS.items()}
CLAMP = Kernel("clamp", (*_FIELDS, "low", "high"), partial(_emit, of=_clamp))
