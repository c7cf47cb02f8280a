"""Check that a rewritten model computes the same: compare both with the original in float64.

Two float32 programs that round in different orders differ. So the new one must not be much further
from the truth than the old one was. The truth is the original in float64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import InputError, VerificationError
from ..machine.crowd import one_thread_if_crowded
from ..models.places import by_call
from ..models.preserve import drawn_so_far, preserved, seed_generators, undrawn
from ..models.trees import each_changed, every_tensor_of, flatten, has_strides
from .comparing import Check, compare, shapes
from .widened import run_in_float64, wide_type

_ASTRAY = 1e-2
"""An original further than this from its own float64 run is as near to any other answer."""

DECIDES = "what"
"""The first word of the checks of numbers that a model decides on."""


@dataclasses.dataclass(frozen=True)
class Verification:
    """Every output on every input.

    `remembered` if an earlier run, of the same weights on inputs like these, gave this verdict.
    `constant` if the original answers the same to inputs that differ, so that it shows little.
    """

    checks: tuple[Check, ...]
    remembered: bool = False
    constant: bool = False

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def in_float64(self) -> bool:
        """Whether there was a float64 run that all of them were held against."""
        return all(check.in_float64 for check in self.checks)

    @property
    def astray(self) -> bool:
        """Whether the original is so far from its own float64 run that this says nothing."""
        return any(check.eager_error > _ASTRAY for check in self.checks)

    @property
    def decided(self) -> bool:
        """Whether the original's decisions stood in for those of the rewritten model."""
        return any(check.output.split(" ")[0] == DECIDES for check in self.checks)

    @property
    def worst(self) -> Check | None:
        """The check that came nearest to its bound, or went furthest over it."""
        return max(self.checks, key=_severity, default=None)

    @property
    def difference(self) -> str:
        """Where the rewritten model differs, and by how much; empty if every check passed."""
        worst = self.worst
        if worst is None or self.passed:
            return ""
        why = worst.reason or (
            f"relative error {worst.error:.2g} where eager's own is {worst.eager_error:.2g} "
            f"and {worst.allowed:.2g} is allowed"
            if worst.in_float64
            else f"relative difference {worst.error:.2g} where {worst.allowed:.2g} is allowed, "
            "without a float64 run to go by"
        )
        return f"differs in {worst.output} on input {worst.input}: {why}"

    def require(self) -> None:
        """Raise VerificationError unless every check passed."""
        if not self.passed:
            raise VerificationError(
                f"the rewritten model {self.difference}. "
                "The original is untouched; leave out passes to find the one at fault."
            )

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "passed": self.passed,
            "in_float64": self.in_float64,
            "remembered": self.remembered,
            "constant": self.constant,
            "checks": [dataclasses.asdict(check) for check in self.checks],
        }


@dataclasses.dataclass(frozen=True)
class Answers:
    """The answers of the original to some inputs, in its own precision and in float64.

    `drawn` says that it draws random numbers.
    """

    inputs: tuple[tuple[Any, ...], ...]
    answers: tuple[dict[str, Any], ...]
    exact: tuple[dict[str, Any], ...] | None
    drawn: bool

    @property
    def constant(self) -> bool:
        """Whether the numbers that are answered are the same to inputs of which none are."""
        first, *others = map(_numbers, self.answers)
        given, *more = (_numbers(dict(flatten(one))) for one in self.inputs)
        alike = bool(first) and all(_equal(first, one) for one in others)
        return alike and bool(more) and not any(_equal(given, one) for one in more)


def _numbers(found: Mapping[str, Any]) -> list[Tensor]:
    tensors = [one for one in found.values() if isinstance(one, Tensor) and has_strides(one)]
    return [one for one in tensors if one.is_floating_point()]


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


@one_thread_if_crowded()
def observe(model: nn.Module, inputs: Sequence[tuple[Any, ...]], *, wide: bool = True) -> Answers:
    """Run `model` on each of `inputs`, once as it is and once, on a copy, in float64.

    `exact` is None if the model cannot run in float64, if it draws random numbers, which differ
    there, or if `wide` is False; then before and after are compared with each other only.
    """
    # Lists: a generator would turn a StopIteration that the model raises into another error.
    observed = [_observed(model, one) for one in inputs]
    answers = tuple(found for found, _ in observed)
    for path, leaf in answers[0].items() if answers else ():
        if isinstance(leaf, Set) and every_tensor_of(tuple(leaf)):
            raise InputError(
                f"{path} of {type(model).__name__} is a set of tensors, which has no order to "
                "compare them in. Return a list or a tuple."
            )
    drawn = any(drew for _, drew in observed)
    exact = None
    if wide and not drawn:
        # A user's forward may raise anything in a precision that it was not written for.
        with contextlib.suppress(Exception):
            exact = run_in_float64(
                model, lambda copy: tuple([answer(copy, doubled(one)) for one in inputs])
            )
    if exact is not None and [*map(shapes, answers)] != [*map(shapes, exact)]:
        exact = None  # The output's shape depends on values (detections): not comparable.
    return Answers(tuple(inputs), answers, exact, drawn)


def verify(truth: Answers, after: Callable[..., Any]) -> Verification:
    """Hold the answers of `after` against the original's.

    >>> net, x = nn.Linear(8, 4), torch.randn(2, 8)
    >>> truth = observe(net, [(x,)])
    >>> verify(truth, net).passed, verify(truth, lambda x: net(x) + 1e-3).passed
    (True, False)
    """
    checks: list[Check] = []
    for index, one in enumerate(truth.inputs):
        before = truth.answers[index]
        exact = truth.exact[index] if truth.exact else before
        checks.extend(compare(index, before, answer(after, one), exact, truth.exact is not None))
    return Verification(tuple(checks))


def answer(function: Callable[..., Any], inputs: tuple[Any, ...]) -> dict[str, Any]:
    """The leaves of what `function` returns for `inputs`, by path; both stay as they were."""
    return _observed(function, inputs)[0]


def _observed(function: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[dict[str, Any], bool]:
    """The leaves of what `function` returns, and whether it drew random numbers."""
    # A model may write into its input; the next run must see the same one.
    own = cloned(inputs)
    # A model may also count its calls or collect results: every run starts from the same state.
    kept = preserved(function) if isinstance(function, nn.Module) else undrawn()
    with torch.no_grad(), kept:
        seed_generators(0)
        random.seed(0)
        before = drawn_so_far()
        args, named = by_call(function, own)
        found = dict(flatten(_call(function)(*args, **named)))
        return found, drawn_so_far() != before


def _call(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`; a graph without the wrapper of torch.fx, which prints what is raised in it."""
    if isinstance(function, fx.GraphModule):
        return partial(nn.Module.__call__, function)
    return function


def _severity(check: Check) -> float:
    if check.reason:
        return math.inf
    return check.error / check.allowed if check.allowed else (math.inf if check.error else 0.0)


def cloned(tree: Any) -> Any:
    """`tree` with tensors of its own, which share memory among them as those of `tree` do."""
    return each_changed(tree, Tensor.clone)


def doubled(tree: Any) -> Any:
    """`tree` with every floating-point tensor in float64, every complex one in complex128."""
    return each_changed(tree, lambda tensor: tensor.to(wide_type(tensor)))
