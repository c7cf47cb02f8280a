"""Judge failures by what the original does on inputs a rounding away.

A model may magnify the last digit a hundred times, and yet be exact on one input because its own
roundings happened to cancel there. So where a rewritten model nearly passes, it is held against the
original's error nearby.

A model that decides by values may answer quite otherwise where one nearly ties with a bound. So one
that is rewritten passes if it is right on another input, and here goes no further than the original
does nearby.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from . import Answers, Verification, observe
from .comparing import FACTOR, Check, compare
from .picking import decides
from .widened import wide_type

_NEIGHBOURS = 4

_JUMPERS = 16
"""Among so many neighbours, as many roundings away as a rewritten model may err, one decides
otherwise if roundings alone make the rewritten one do so."""

_NEAR = 100.0
"""An error more than this many times the allowed one cannot be bad luck."""

_STEADY = 1000.0
"""So many roundings between input and answer add up at most, by far."""


def without_luck(found: Verification, truth: Answers, model: nn.Module) -> Verification:
    """`found`, with near failures held against the original's largest error nearby instead."""
    near = {check.input for check in found.checks if _nearly_passed(check)}
    if not found.in_float64 or any(not (c.passed or _nearly_passed(c)) for c in found.checks):
        return found
    errors = {index: _errors_near(truth.inputs[index], model) for index in near}

    def judged(check: Check) -> Check:
        eager = errors.get(check.input, {}).get(check.output, 0.0)
        if check.passed or eager <= check.eager_error:
            return check
        return dataclasses.replace(check, eager_error=eager, allowed=FACTOR * eager)

    return dataclasses.replace(found, checks=tuple(map(judged, found.checks)))


def _nearly_passed(check: Check) -> bool:
    return not check.passed and not check.reason and check.error <= _NEAR * check.allowed


def proves_nothing(found: Verification, truth: Answers, model: nn.Module) -> bool:
    """Whether the run in float64 is far from the original for another reason than rounding.

    The original decides by values, and did so otherwise; or its copy computes something else.
    """
    return found.astray and (decides(model, truth.inputs[0]) or _is_steady(found, truth, model))


def _is_steady(found: Verification, truth: Answers, model: nn.Module) -> bool:
    """Whether inputs a rounding away move the answers far less than the run in float64 did."""
    eager = max((check.eager_error for check in found.checks), default=0.0)
    if not math.isfinite(eager):
        return False
    # What cancels but for roundings is any number of times as large as it is in float64.
    eager = min(eager, 1.0)
    moved = 0.0
    for place, inputs in enumerate(truth.inputs):
        nearby = _moved(model, truth.answers[place], [*_near(inputs)])
        moved = max([moved, *(check.error for check in nearby)])
    return _STEADY * moved < eager


def by_jumps(found: Verification, truth: Answers, model: nn.Module) -> Verification:
    """`found`, where the original decides by values, with what failed on some of the inputs held
    against how far the original's answers jump there."""
    failed = {check.input for check in found.checks if not check.passed}
    unlike = any(check.reason for check in found.checks)
    if unlike or len(failed) == len(truth.inputs):
        return found
    if not decides(model, truth.inputs[0], comparing=True):
        return found
    for index in failed:
        for near in _near(truth.inputs[index], _JUMPERS, FACTOR):
            jumps = _largest(_moved(model, truth.answers[index], [near]))
            found = dataclasses.replace(
                found, checks=tuple(_allowing(check, index, jumps) for check in found.checks)
            )
            if all(check.passed for check in found.checks if check.input == index):
                break
    return found


def _allowing(check: Check, index: int, jumps: dict[str, float]) -> Check:
    allowed = FACTOR * jumps.get(check.output, 0.0)
    if check.input != index or check.passed or allowed <= check.allowed:
        return check
    return dataclasses.replace(check, allowed=allowed)


def _moved(
    model: nn.Module, before: dict[str, Any], nearby: Sequence[tuple[Any, ...]]
) -> Iterator[Check]:
    """How far each answer is from `before` on each of the inputs `nearby`."""
    for answers in observe(model, nearby, wide=False).answers:
        yield from compare(0, before, answers, before, wide=True)


def _errors_near(inputs: tuple[Any, ...], model: nn.Module) -> dict[str, float]:
    """Return, for each output, the largest error of `model` on inputs very close to these."""
    truth = observe(model, [*_near(inputs)])
    pairs = zip(truth.answers, truth.exact or truth.answers, strict=True)
    return _largest(
        check for before, exact in pairs for check in compare(0, before, before, exact, wide=True)
    )


def _largest(checks: Iterable[Check]) -> dict[str, float]:
    """The largest error of each output; an infinite one is no measure of others."""
    worst: dict[str, float] = {}
    for check in checks:
        if math.isfinite(check.error):
            worst[check.output] = max(worst.get(check.output, 0.0), check.error)
    return worst


def _near(
    inputs: tuple[Any, ...], count: int = _NEIGHBOURS, roundings: float = 1.0
) -> Iterator[tuple[Any, ...]]:
    """Inputs that are `roundings` away from these."""
    generator = torch.Generator().manual_seed(0)

    def nudged(value: Any) -> Any:
        if not isinstance(value, Tensor) or wide_type(value) is None or value.is_complex():
            return value
        if value.itemsize == 1:  # torch draws none, and a model computes with them in others
            return value
        drawn = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        drawn.uniform_(-1, 1, generator=generator)
        size = roundings * torch.finfo(value.dtype).eps
        return value.detach().clone().mul_(1 + size * drawn.to(value.device))

    for _ in range(count):
        yield tree_map(nudged, inputs)
