"""Functions of one number: bounds, roots, whole numbers, the exponential and the logarithm.

Heads compute with them what they say of boxes: `exp` of a size, the inverse of a sigmoid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ..language.compiler import Args, Kernel
from ..language.loops import each_vector, emit_runs
from ..language.values import Value
from ..language.vectors import Emitter
from ..tape.steps import Argument, Step, View, pixelwise, step
from .curves import emit_exp, emit_log, erf, even, softplus, words

FIELDS = ("x", "x_pixel", "pixels", "c", "y", "y_pixel")


def unary_step(x: View, y: View, *, kind: str) -> Step:
    """A function of each number: one of UNARY."""
    return step(UNARY[kind], **pixels_of(x, y))


def clamp_step(x: View, y: View, *, low: float, high: float) -> Step:
    """Each number within bounds, of which `high` is the stronger; NaN stays NaN."""
    return step(CLAMP, **pixels_of(x, y), low=float(low), high=float(high))


def pixels_of(x: View, y: View) -> dict[str, Argument]:
    """The arguments for FIELDS."""
    return {**pixelwise(x, y), "y": y, "y_pixel": y.pixel}


def emit_each(
    e: Emitter,
    a: Args,
    thread: Value,
    threads: Value,
    *,
    of: Callable[..., Value],
    views: Sequence[str] = ("x",),
) -> None:
    """Store `of(e, a, *vectors)`, with one vector of each of the `views`, throughout y."""
    begin, end = e.share(a.pixels, thread, threads)
    strides = [getattr(a, f"{name}_pixel") for name in (*views, "y")]
    pixels, c = emit_runs(e, end - begin, a.c, *strides)
    with e.range(0, pixels) as i:
        *sources, target = (
            getattr(a, name).floats() + (begin + i) * stride
            for name, stride in zip((*views, "y"), strides, strict=True)
        )

        def channels(channel: Value, mask: Value | None) -> None:
            given = [e.load(source + channel, mask) for source in sources]
            e.store(of(e, a, *given), target + channel, mask)

        each_vector(e, 0, c, channels)


def _clamp(e: Emitter, a: Args, value: Value) -> Value:
    low, high = (e.broadcast(e.float_of_bits(bound)) for bound in (a.low, a.high))
    value = e.select(value < low, low, value)
    return e.select(value > high, high, value)


def _log_of_more(e: Emitter, x: Value) -> Value:
    """log(1 + x), all digits right also where 1 + x has lost most of x."""
    more = x + 1.0
    found = emit_log(e, more) * (x / (more - 1.0))
    return e.select((more == 1.0) | (x == float("inf")), x, found)


def _rounded(e: Emitter, x: Value) -> Value:
    """The nearest whole number, the even one of two; floats from 2**23 on are all whole."""
    size, most = _absolute(e, x), even(e, 2.0**23)
    return _with_sign_of(e, e.select(size < most, (size + most) - most, size), x)


def _floor(e: Emitter, x: Value) -> Value:
    whole = _rounded(e, x)
    return whole - e.select(whole > x, even(e, 1.0), even(e, 0.0))


def _sign(e: Emitter, x: Value) -> Value:
    """1, -1 or 0; 0 of what is no number, as torch has it."""
    below = e.select(x < 0.0, even(e, -1.0), even(e, 0.0))
    return e.select(x > 0.0, even(e, 1.0), below)


def _absolute(e: Emitter, x: Value) -> Value:
    return e.select(x <= 0.0, 0.0 - x, x)


def _with_sign_of(e: Emitter, size: Value, x: Value) -> Value:
    sign = words(e, -(2**31))
    sizes, signs = (e.builder.bitcast(one.llvm, sign.type) for one in (size, x))
    both = e.builder.or_(sizes, e.builder.and_(signs, sign))
    return Value(e, e.builder.bitcast(both, e.vector_type))


_FUNCTIONS: dict[str, Callable[[Emitter, Value], Value]] = {
    "abs": _absolute,
    "ceil": lambda e, x: -_floor(e, -x),
    "erf": erf,
    "exp": emit_exp,
    "floor": _floor,
    "log": emit_log,
    "log1p": _log_of_more,
    "log_sigmoid": lambda e, x: -softplus(e, -x),
    "reciprocal": lambda e, x: 1.0 / x,
    "round": _rounded,
    "rsqrt": lambda e, x: 1.0 / e.sqrt(x),
    "sign": _sign,
    "softsign": lambda e, x: x / (_absolute(e, x) + 1.0),
    "sqrt": lambda e, x: e.sqrt(x),
    "trunc": lambda e, x: _with_sign_of(e, _floor(e, _absolute(e, x)), x),
}


def _apply(e: Emitter, a: Args, x: Value, *, function: Callable[[Emitter, Value], Value]) -> Value:
    return function(e, x)


UNARY = {
    name: Kernel(name, FIELDS, partial(emit_each, of=partial(_apply, function=function)))
    for name, function in _FUNCTIONS.items()
}
CLAMP = Kernel("clamp", (*FIELDS, "low", "high"), partial(emit_each, of=_clamp))
