"""Sums, products and activations of images, volumes and rows."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from ...kernels.layers.choosing import against_step, compared_step, replaced_step
from ...kernels.layers.elementwise import (
    activation_step,
    add_step,
    affine_step,
    multiply_step,
    pixel_step,
    prelu_step,
    spread_step,
)
from ...kernels.layers.unary import UNARY, clamp_step, unary_step
from ...kernels.tape.steps import Step, View
from ...operators.activations import FUNCTIONS, NamedActivation, of_call, of_module
from ..implementation import Implementation
from .calls import Lowered, OperatorCall
from .products import ORDERED, with_number_of_row
from .weighted import in_ours
from .windows import Make

_OF_NAME = {
    getattr(function, "__name__", function): of_module(kind())
    for function, kind in FUNCTIONS.items()
}
"""The activations of functions and methods that are given nothing but a tensor."""
_OF_KIND = {nn.Softsign: "softsign", nn.LogSigmoid: "log_sigmoid"}
"""Modules whose names are those of functions."""


def add(call: OperatorCall) -> Lowered:
    if not call.two():
        return _affine(call, sign=1)
    if call.seen(0).shape != call.seen(1).shape:
        return _with_map(call, "sum") or _spread(call, "sum")
    return call.steps(add_step)


def subtract(call: OperatorCall) -> Lowered:
    if not call.two():
        return _affine(call, sign=-1)
    if call.seen(0).shape != call.seen(1).shape:
        return _with_map(call, "difference") or _spread(call, "difference")
    return call.steps(subtract_step) if len(call.out.shape) in (4, 5) else None


def _spread(call: OperatorCall, kind: str) -> Implementation | None:
    """An image, and another of fewer pixels: one for each image, one for all, one image for all."""
    whole, other = call.seen(0).shape, call.seen(1).shape
    swapped = whole != call.out.shape
    if swapped:
        whole, other = other, whole
    if len(whole) not in (4, 5) or whole != call.out.shape or (swapped and kind != "sum"):
        return None
    one = (1,) * (len(whole) - 2)
    shared = other in ((whole[1], *one), (1, whole[1], *one))
    if not shared and other not in ((*whole[:2], *one), (1, *whole[1:])):
        return None

    def make(x: View, other: View, y: View) -> Step:
        x, other = (other, x) if swapped else (x, other)
        return spread_step(x, _pixel(other) if shared else other, y, kind=kind)

    return call.steps(make)


def subtract_step(x: View, other: View, y: View) -> Step:
    """x - other."""
    return affine_step(other, y, -torch.ones(y.shape[1]), residual=x)


def product_added(x: View, one: View, other: View, y: View) -> Step:
    """x + one * other."""
    return multiply_step(one, other, y, residual=x)


def negated_step(x: View, y: View) -> Step:
    """-x."""
    return affine_step(x, y, -torch.ones(y.shape[1]))


def multiply(call: OperatorCall) -> Lowered:
    """Two tensors of one shape, a factor for each channel or for each pixel, or a number."""
    if not call.two():
        return _affine(call, power=1)
    with_map = _with_map(call, "product")
    if with_map:
        return with_map
    (a, b), out = (call.seen(0).shape, call.seen(1).shape), call.out.shape
    gate = (*out[:2], *[1] * (len(out) - 2)) if len(out) > 3 else (*out[:2], 1, 1)
    # The first operand is the factor only if it has another shape than the result.
    first = a != out
    whole, factor = (b, a) if first else (a, b)
    shared = len(out) > 3 and factor in (gate[1:], (1, *gate[1:]))
    if whole != out or not (shared or factor in (out, gate)):
        return None

    def make(one: View, other: View, y: View) -> Step:
        x, factor = (other, one) if first else (one, other)
        return multiply_step(x, _pixel(factor) if shared else factor, y)

    return call.steps(make)


def divide(call: OperatorCall) -> Lowered:
    return _with_map(call, "quotient") if call.two() else _affine(call, power=-1)


def _with_map(call: OperatorCall, kind: str) -> Lowered:
    """An image and one number for each of its pixels, a map of one channel.

    What is shaped so may be matrices of heads as well, which are taken as they lie.
    """
    shapes, out = [call.seen(0).shape, call.seen(1).shape], call.out.shape
    one = (*out[:1], 1, *out[2:])
    if len(out) not in (4, 5) or one == out or sorted(shapes) != sorted([one, out]):
        return None
    first = shapes[0] == one
    if first and kind in ORDERED:
        return None

    def make(x: View, other: View, y: View) -> Step:
        return pixel_step(*((other, x) if first else (x, other)), y, kind=kind)

    rows = with_number_of_row(call.record, call.layer, kind)
    return tuple(filter(None, (call.steps(make), rows)))


def _affine(call: OperatorCall, *, power: int = 0, sign: int = 0) -> Implementation | None:
    make = with_number(call, power=power, sign=sign)
    return call.steps(make) if make else None


def with_number(call: OperatorCall, *, power: int = 0, sign: int = 0) -> Make | None:
    """x * number**power + sign * number, where the other operand is a number; or number - x."""
    args = call.args
    if len(args) != 2 or call.node.kwargs:
        return None
    number = next((arg for arg in args if type(arg) in (int, float)), None)
    swapped = number is args[0] and min(power, sign) < 0
    if number is None or not is_ordinary(number) or (power < 0 and (swapped or not number)):
        return None
    scale, shift = number**power, 1.0 * sign * number if sign else -0.0
    if swapped:
        scale, shift = -1, number

    def make(x: View, y: View) -> Step:
        every = lambda number: torch.full(x.shape[1:2], number)
        return affine_step(x, y, every(float(scale)), every(shift))

    return make


def is_ordinary(number: float) -> bool:
    """Whether 0 times it is 0, and multiplying by its reciprocal is as good as dividing by it."""
    return not number or 1e-37 < abs(number) < 1e37


def _pixel(view: View) -> View:
    """View numbers that lie without gaps as one pixel of as many channels."""
    return view.as_numbers(1, view.pixels * view.shape[1], 1, 1)


def square(call: OperatorCall) -> Implementation | None:
    make = squaring(call)
    return call.steps(make) if make else None


def squaring(call: OperatorCall) -> Make | None:
    """The step of `x ** 2` or `x.square()`."""
    power = call.args[1:] if call.name == "pow" else (2,)
    plain = power in ((2,), (2.0,)) and not call.node.kwargs and len(call.layer.inputs) == 1
    return (lambda x, y: multiply_step(x, x, y)) if plain else None


def prelu(call: OperatorCall) -> Implementation | None:
    weight = call.module.weight
    return call.on_pixels(lambda x, y: prelu_step(x, y, weight))


def activation(call: OperatorCall) -> Implementation | None:
    make = activating(call)
    return call.steps(make) if make else None


def activating(call: OperatorCall) -> Make | None:
    """The step of an activation or of another function of each number; None for what is none, and
    for one that our kernels lack."""
    name = call.name if call.module is None else _OF_KIND.get(type(call.module))
    if name in UNARY:
        return partial(unary_step, kind=name) if call.alone() else None
    if name in ("clamp", "clip"):
        return _clamping(call, {"min": None, "max": None})
    if name == "hardtanh":
        return _clamping(call, {"min_val": -1.0, "max_val": 1.0, "inplace": False})
    found = _named(call)
    code = in_ours(found) if found else None
    return code and (lambda x, y: activation_step(x, y, code[0], slope=code[1]))


def _clamping(call: OperatorCall, usual: dict[str, Any]) -> Make | None:
    """The step of a call with two bounds, of numbers, which are first among what it may be given
    besides the tensor."""
    given = dict(zip(("input", *usual), call.args, strict=False)) | call.node.kwargs
    if not given.keys() <= {"input", *usual}:
        return None
    low, high, *_ = (given.get(name, default) for name, default in usual.items())
    if any(one is not None and type(one) not in (int, float) for one in (low, high)):
        return None
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    return partial(clamp_step, low=low, high=high)


def _named(call: OperatorCall) -> NamedActivation | None:
    if call.module is not None:
        return of_module(call.module)
    found = of_module(of_call(call.node))
    return found or (_OF_NAME.get(call.name) if call.alone() else None)


def comparing(call: OperatorCall) -> Make:
    """The step of `compared`."""
    *_, other, how = call.args
    if isinstance(other, fx.Node):
        return partial(compared_step, how=how)
    return partial(against_step, how=how, number=float(other))


MARKS = ("replaced", "marked", "marked_in_place")
CHOICES = ("chosen", "chosen_to_fill", "chosen_in_place")
"""Functions of `plan.masks` that compute the same, and lie otherwise in memory."""


def replacing(call: OperatorCall) -> Make:
    """The step of each of `MARKS`."""
    *_, number, answer = call.args
    return partial(replaced_step, number=number, answer=answer)
