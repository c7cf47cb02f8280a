"""Check that a rewritten model computes the same: compare both with the original in float64.

Two float32 programs that round in different orders differ. So the new one must not be much further
from the truth than the old one was. The truth is the original in float64.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ..errors import InputError, VerificationError
from ..models.places import by_call
from ..models.preserve import drawn_so_far, preserved, undrawn
from ..models.trees import each_changed, every_tensor_of, flatten
from .widened import run_in_float64, wide_type

FACTOR = 10.0
"""A rewritten model may err this many times as much as eager does."""

_ASTRAY = 1e-2
"""An original further than this from its own float64 run is as near to any other answer."""

DECIDES = "what"
"""The first word of the checks of numbers that a model decides on."""

_TINY = 0.125
"""The share of zeros and denormal numbers among others."""

_FLOOR = 8.0
"""Errors under this many roundings pass: on a tiny model eager's own may happen to be zero."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One output tensor on one input; errors are relative to the largest value of the output."""

    input: int
    output: str
    error: float
    eager_error: float
    allowed: float
    reason: str = ""

    @property
    def passed(self) -> bool:
        return not self.reason and self.error <= self.allowed


@dataclasses.dataclass(frozen=True)
class Verification:
    """Every output on every input, and whether there was a float64 run to hold them against.

    `remembered` if an earlier run, of the same weights on inputs like these, gave this verdict.
    """

    checks: tuple[Check, ...]
    in_float64: bool
    remembered: bool = False

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

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

    def require(self) -> None:
        """Raise VerificationError unless every check passed."""
        worst = self.worst
        if worst is None or self.passed:
            return
        why = worst.reason or (
            f"relative error {worst.error:.2g} where eager's own is {worst.eager_error:.2g} "
            f"and {worst.allowed:.2g} is allowed"
        )
        raise VerificationError(
            f"the rewritten model differs in {worst.output} on input {worst.input}: {why}. "
            "The original is untouched; leave out passes to find the one at fault."
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "passed": self.passed,
            "in_float64": self.in_float64,
            "remembered": self.remembered,
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
    return Verification(tuple(checks), truth.exact is not None)


def random_inputs(example: Sequence[Any], count: int, seed: int = 0) -> list[tuple[Any, ...]]:
    """The example, then `count - 1` others like it: normal, then uniform, values.

    Uniform ones have zeros and denormal numbers among them. Integers and booleans keep the
    example's values, which may be indices into something.
    """
    generator = torch.Generator().manual_seed(seed)

    def like(turn: int, value: Any) -> Any:
        if not holds_numbers(value):
            return value
        drawn = torch.empty((*value.shape, 1 + value.is_complex()), device="cpu")
        drawn = (drawn.normal_ if turn % 2 else drawn.uniform_)(generator=generator)
        if turn % 2 == 0:
            tiny = torch.rand(drawn.shape, generator=generator, device="cpu")
            drawn[tiny < _TINY] *= 1e-40
            drawn[tiny < _TINY / 2] = 0
        drawn = torch.view_as_complex(drawn) if value.is_complex() else drawn[..., 0]
        # Assigning into a like tensor keeps the example's strides, which a plan may depend on.
        return torch.empty_like(value, requires_grad=False).copy_(drawn)

    return [
        tuple(tree_map(_detached if turn == 0 else partial(like, turn), tuple(example)))
        for turn in range(count)
    ]


def holds_numbers(value: Any) -> bool:
    """Whether others can be drawn in their place: not of a sparse tensor, which has some places."""
    plain = isinstance(value, Tensor) and value.layout is torch.strided
    return plain and wide_type(value) is not None


def reordered_inputs(example: Sequence[Any], seed: int = 0) -> tuple[Any, ...]:
    """The example with the numbers of each tensor in another order: within the same bounds.

    >>> [turned] = reordered_inputs([torch.arange(4.0)])
    >>> turned.sort().values
    tensor([0., 1., 2., 3.])
    """
    generator = torch.Generator().manual_seed(seed)

    def turned(value: Any) -> Any:
        if not holds_numbers(value):
            return value
        order = torch.randperm(value.numel(), generator=generator, device="cpu")
        numbers = value.detach().flatten()[order.to(value.device)].view(value.shape)
        return torch.empty_like(value, requires_grad=False).copy_(numbers)

    return tuple(tree_map(turned, tuple(example)))


def without_numbers(example: Sequence[Any]) -> tuple[Any, ...]:
    """The example with NaN throughout the first image, or other first entry, of each tensor.

    >>> without_numbers([torch.ones(2, 2)])
    (tensor([[nan, nan],
            [1., 1.]]),)
    """

    def like(value: Any) -> Any:
        if not holds_numbers(value):
            return value
        changed = value.detach().clone()
        (changed[:1] if changed.ndim else changed).fill_(math.nan)
        return changed

    return tuple(tree_map(like, tuple(example)))


def lost_nans(before: dict[str, Any], after: dict[str, Any]) -> Iterator[Check]:
    """A failed check for each output that has finite numbers where `before` has NaN.

    Its other numbers are not compared: kernels may spread NaN.
    """
    for path in before:
        old, new = map(numbers, (before[path], after.get(path)))
        if not isinstance(old, Tensor) or not isinstance(new, Tensor) or old.shape != new.shape:
            continue
        # Torch does not say of each type of 8 bits which of its numbers are finite.
        new = new.double() if new.is_floating_point() else new
        lost = int((old.isnan() & new.isfinite()).sum())
        if lost:
            reason = f"{lost} of {old.numel()} numbers are finite where the model answers NaN"
            yield Check(0, f"{path}, for NaN", math.inf, 0.0, 0.0, reason)


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
        torch.manual_seed(0)
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


def picks(func: Any) -> bool:
    """Whether this operator picks among numbers, so that its choice jumps where two nearly tie."""
    return func._overloadpacket.__name__ in _PICKING


class _Decisions(TorchDispatchMode):
    """Notices operators whose results jump where the numbers that they are given hardly differ."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or picks(func) or _jumps(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _jumps(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator rounds, or says where the largest number lies."""
    name = func._overloadpacket.__name__.removesuffix("_")
    if name == "_to_copy" and kwargs.get("dtype") is not None:
        kind, was = kwargs["dtype"], args[0].dtype
        whole = not (kind.is_floating_point or kind.is_complex)
        return was.is_floating_point and (whole or kind.itemsize < was.itemsize)
    found = name in _ROUNDING or (name in ("max", "min") and func._overloadname == "dim")
    return found or kwargs.get("rounding_mode") is not None


_PICKING = frozenset(
    ("topk", "sort", "argsort", "argmax", "argmin", "kthvalue", "median", "mode", "nms")
)
_ROUNDING = frozenset(
    (
        *("round", "floor", "ceil", "trunc", "sign", "frac"),
        *("nonzero", "searchsorted", "bucketize", "floor_divide", "remainder", "fmod"),
        *("cummax", "cummin", "nanmedian", "_unique2", "unique_dim"),
    )
)


def decides(model: nn.Module, inputs: tuple[Any, ...]) -> bool:
    """Whether the model sorts, picks or rounds numbers: two right ones may answer otherwise.

    >>> decides(nn.ReLU(), (torch.ones(3),)), decides(nn.Threshold(0, 0), (torch.ones(3),))
    (False, False)
    >>> class Largest(nn.Module):
    ...     def forward(self, x):
    ...         return x.topk(2).values
    >>> decides(Largest(), (torch.ones(3),))
    True
    """
    with _Decisions() as seen:
        answer(model, inputs)
    return bool(seen.found)


def compare(
    index: int, before: dict[str, Any], after: dict[str, Any], exact: dict[str, Any], wide: bool
) -> Iterator[Check]:
    """Compare both answers with `exact`, which is in float64 if `wide`."""
    if list(before) != list(after):
        reason = f"the outputs are {sorted(after)}, they were {sorted(before)}"
        yield Check(index, "output", math.inf, 0.0, 0.0, reason)
        return
    for path in before:
        old, new = map(numbers, (before[path], after[path]))
        if not isinstance(old, Tensor) or not isinstance(new, Tensor):
            if not _equal(old, new):
                reason = f"{str(new)[:40]} where it was {str(old)[:40]}"
                yield Check(index, path, math.inf, 0.0, 0.0, reason)
        elif old.shape != new.shape or old.dtype != new.dtype:
            reason = f"{new.dtype} {tuple(new.shape)} where it was {old.dtype} {tuple(old.shape)}"
            yield Check(index, path, math.inf, 0.0, 0.0, reason)
        elif not (old.is_floating_point() or old.is_complex()):
            wrong = float((old != new).double().mean()) if old.numel() else 0.0
            yield Check(index, path, wrong, 0.0, 0.0)
        else:
            eager = _relative(old, numbers(exact[path])) if wide else 0.0
            # Without a float64 run, deep networks differ by a few hundred roundings.
            floor = torch.finfo(old.dtype).eps * (_FLOOR if wide else 32 * _FLOOR)
            allowed = FACTOR * max(eager, floor)
            yield Check(index, path, _relative(new, numbers(exact[path])), eager, allowed)


def numbers(value: Any) -> Any:
    """A number, an array of numpy's or a tensor of another kind as a plain tensor.

    >>> numbers(numpy.ones(2)), numbers("a text")
    (tensor([1., 1.], dtype=torch.float64), 'a text')
    """
    if isinstance(value, numpy.ndarray | numpy.generic):
        # Torch has none of texts and of objects.
        with contextlib.suppress(TypeError):
            return torch.tensor(value.copy())
    if not isinstance(value, Tensor):
        return torch.tensor(value) if type(value) in (float, complex) else value
    if value.is_quantized:
        return value.dequantize()
    return value if value.layout is torch.strided else value.to_dense()


def _relative(value: Tensor, truth: Tensor) -> float:
    """The largest difference, over the largest finite value; NaN and infinities must coincide."""
    if not value.numel():
        return 0.0
    value, truth = _parts(value), _parts(truth)
    finite = torch.isfinite(truth)
    if not torch.equal(finite, torch.isfinite(value)):
        return math.inf
    if not torch.equal(value[~finite].nan_to_num(0.0), truth[~finite].nan_to_num(0.0)):
        return math.inf
    if not finite.any():
        return 0.0
    scale = truth[finite].abs().max().item()
    difference = (value[finite] - truth[finite]).abs().max().item()
    return difference / scale if scale else difference


def _parts(value: Tensor) -> Tensor:
    """The numbers in float64, complex ones as two."""
    value = value.detach()
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    return value.double()


def _severity(check: Check) -> float:
    if check.reason:
        return math.inf
    return check.error / check.allowed if check.allowed else (math.inf if check.error else 0.0)


def _equal(old: Any, new: Any) -> bool:
    if isinstance(old, Tensor) or isinstance(new, Tensor) or type(old) is not type(new):
        return False
    # An object without an __eq__ of its own equals only itself, which proves no difference.
    if "__eq__" not in _defined(type(old)):
        return True
    try:
        return bool(old == new)
    except Exception:
        # It holds tensors or arrays: comparing these gives no one answer.
        return True


def _defined(kind: type) -> set[str]:
    """Return the names that a class and its bases define, except those of `object`."""
    return {name for base in kind.__mro__ if base is not object for name in vars(base)}


def shapes(answer: dict[str, Any]) -> list[Any]:
    """The shape of each leaf; a nested tensor has none that could be asked for."""
    plain = {
        k: isinstance(v, Tensor | numpy.ndarray) and not getattr(v, "is_nested", False)
        for k, v in answer.items()
    }
    return [(k, tuple(v.shape) if plain[k] else None) for k, v in answer.items()]


def cloned(tree: Any) -> Any:
    """`tree` with tensors of its own, which share memory among them as those of `tree` do."""
    return each_changed(tree, Tensor.clone)


def doubled(tree: Any) -> Any:
    """`tree` with every floating-point tensor in float64, every complex one in complex128."""
    return each_changed(tree, lambda tensor: tensor.to(wide_type(tensor)))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
