"""Judge near failures by the original's usual error: on this one input it may have had luck.

A model may magnify the last digit a hundred times, and yet be exact on one input because its own
roundings happened to cancel there. So a rewritten model is held against the error that the original
has on inputs a rounding away.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from . import Answers, Verification, observe
from .comparing import FACTOR, Check, compare
from .picking import decides
from .widened import wide_type

_NEIGHBOURS = 4

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
        near = observe(model, _near(inputs), wide=False)
        for answers in near.answers:
            checks = compare(0, truth.answers[place], answers, truth.answers[place], wide=True)
            moved = max([moved, *(check.error for check in checks)])
    return _STEADY * moved < eager


def _errors_near(inputs: tuple[Any, ...], model: nn.Module) -> dict[str, float]:
    """Return, for each output, the largest error of `model` on inputs very close to these."""
    truth = observe(model, _near(inputs))
    worst: dict[str, float] = {}
    for before, exact in zip(truth.answers, truth.exact or truth.answers, strict=True):
        for check in compare(0, before, before, exact, wide=True):
            if math.isfinite(check.error):
                worst[check.output] = max(worst.get(check.output, 0.0), check.error)
    return worst


def _near(inputs: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Inputs a rounding away from these."""
    generator = torch.Generator().manual_seed(0)

    def nudged(value: Any) -> Any:
        if not isinstance(value, Tensor) or wide_type(value) is None or value.is_complex():
            return value
        drawn = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        drawn.uniform_(-1, 1, generator=generator)
        size = torch.finfo(value.dtype).eps
        return value.detach().clone().mul_(1 + size * drawn.to(value.device))

    return [tree_map(nudged, inputs) for _ in range(_NEIGHBOURS)]
