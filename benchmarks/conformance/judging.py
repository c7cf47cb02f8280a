"""Whether a model is answered rightly by each verb: as eager PyTorch does, in every respect."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import nhwc
from nhwc.models.preserve import copy_as_is

from .exact import Exact

RIGHT, REFUSED, WRONG, FAILED = VERDICTS = ("right", "refused", "wrong", "failed")

_HERE = f"{Path(__file__).parents[2]}/"
"""Where the sources lie, which the place of an error begins with on this machine alone."""

_TOLERANCE = {
    torch.float16: 1e-2,
    torch.bfloat16: 4e-2,
    torch.float64: 1e-7,
    torch.complex128: 1e-7,
}


@dataclass(frozen=True)
class Case:
    """A model, what it is called with, and what about its answer means nothing."""

    name: str
    model: nn.Module
    inputs: tuple[Any, ...]
    unset: bool = False
    """Its values are whatever was in memory before: only their shape and type are told."""
    steep: bool = False
    """It may enlarge differences of rounding without limit: an inverse, a decomposition."""
    strides: bool = True
    """The strides of what it returns are its promise, not an accident of how it was computed."""
    wide: bool = False
    """Its values are held against those of the model in float64: as near as eager ones, or so."""
    made: dict[str, Any] = field(default_factory=dict, compare=False)
    """What one verb made of the model and a later one may take up."""


@dataclass(frozen=True)
class Verb:
    """One question about a model: what to make of it, and what that must answer like."""

    prepare: Callable[[Case], Callable[..., Any]]
    reference: Callable[[Case], Callable[..., Any]] | None = None
    """What torch makes of the model; None for the model as it is."""
    exact: Callable[[nn.Module], Callable[..., Any]] = nn.Module.eval
    """What is called of the model in float64."""
    strides: bool = True
    """The strides of what it gives are a promise; those of gradients are nobody's."""


class NothingToAsk(Exception):
    """A reference raises it where a question means nothing for this case."""


@dataclass(frozen=True)
class Outcome:
    case: str
    verb: str
    verdict: str
    why: str = ""


@dataclass(frozen=True)
class Answer:
    """What a call left behind: its result or its error, and what it did to its inputs."""

    value: Any
    inputs: Any
    error: Exception | None = None


def judge(case: Case, verbs: Mapping[str, Verb]) -> Iterator[Outcome]:
    """Ask each of `verbs` about the model of `case`, and compare how the result answers."""
    state = {name: value.clone() for name, value in case.model.state_dict().items()}
    try:
        model = copy_as_is(case.model)
    except NotImplementedError:
        # It holds a sparse tensor of a kind that not even torch can copy.
        return
    eager = _Expected.of(case, model, nn.Module.eval)
    for name, verb in verbs.items():
        expected = eager
        if verb.reference is not None:
            try:
                with _quiet():
                    reference = verb.reference(case)
            except Exception:
                # Not even torch does this with the model as it is.
                continue
            expected = _Expected.of(case, reference, verb.exact)
        if isinstance(expected.answer.error, NothingToAsk):
            continue
        outcome = _asked(case, name, verb, expected)
        why = _touched(case, state)
        yield replace(outcome, verdict=WRONG, why=why) if why else outcome


@dataclass(frozen=True)
class _Expected:
    """What a verb must answer: eager's answer, and the exact one if that counts."""

    answer: Answer
    truth: Exact | None

    @classmethod
    def of(
        cls,
        case: Case,
        call: Callable[..., Any],
        exact: Callable[[nn.Module], Callable[..., Any]],
    ) -> _Expected:
        found = answer(call, case.inputs)
        if not case.wide or found.error is not None:
            return cls(found, None)

        def ask(model: nn.Module, inputs: tuple[Any, ...]) -> list[Any]:
            true = answer(exact(model), inputs)
            return [] if true.error else pytree.tree_leaves(true.value)

        return cls(found, Exact(ask, case.model, case.inputs))


def _asked(case: Case, name: str, verb: Verb, expected: _Expected) -> Outcome:
    given = replace(case, inputs=own(case.inputs))
    try:
        with _quiet():
            prepared = verb.prepare(given)
    except nhwc.NhwcError as error:
        return Outcome(case.name, name, *_refusal(case, error, expected.answer))
    except Exception as error:
        if expected.answer.error is not None and _alike(error, expected.answer.error):
            return Outcome(case.name, name, RIGHT)
        return Outcome(case.name, name, FAILED, _said(error))
    if why := _differs(case, case.inputs, given.inputs):
        return Outcome(case.name, name, WRONG, f"the example inputs: {why}")
    held, truth = replace(case, strides=case.strides and verb.strides), expected.truth
    if truth is not None:
        truth.steep.clear()
    if why := difference(held, expected.answer, answer(prepared, case.inputs), truth):
        return Outcome(case.name, name, WRONG, why)
    return Outcome(case.name, name, RIGHT, "; ".join(truth.steep) if truth else "")


def answer(call: Callable[..., Any], inputs: tuple[Any, ...]) -> Answer:
    given = own(inputs)
    torch.manual_seed(0)
    try:
        with _quiet(), torch.no_grad():
            return Answer(call(*given), given)
    except Exception as error:
        return Answer(None, given, error)


def difference(case: Case, expected: Answer, given: Answer, truth: Exact | None = None) -> str:
    """Say how `given` differs from `expected`; an empty string if it does not."""
    if expected.error is not None or given.error is not None:
        if expected.error is None:
            return f"raises {_said(given.error)}"
        if given.error is None:
            return f"does not raise {_said(expected.error)}"
        return "" if _alike(given.error, expected.error) else (
            f"raises {_said(given.error)}, not {_said(expected.error)}"
        )  # fmt: skip
    if why := _differs(case, expected.value, given.value, truth):
        return why
    if why := _differs(case, expected.inputs, given.inputs):
        return f"its inputs after the call: {why}"
    before, after = _shared(expected), _shared(given)
    if before != after:
        return f"outputs share memory with inputs {after}, not {before}"
    before, after = _together(expected), _together(given)
    return "" if before == after else f"outputs lie in memory as {after}, not as {before}"


def _differs(case: Case, expected: Any, given: Any, truth: Exact | None = None) -> str:
    (ours, shape), (theirs, other) = pytree.tree_flatten(given), pytree.tree_flatten(expected)
    if shape != other:
        return f"is a {_kind(given)}, not a {_kind(expected)}"
    for place, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
        why = _unlike(case, its, mine) if isinstance(its, Tensor) else _other(its, mine)
        if not why and isinstance(its, Tensor) and not (case.unset or case.steep):
            why = _far(its, mine, truth, place)
        if why:
            return why
    return ""


def _unlike(case: Case, expected: Tensor, given: Any) -> str:
    """Say how anything but the numbers differs."""
    if type(given) is not type(expected):
        return f"is {type(given).__name__}, not {type(expected).__name__}"
    for asked in ("dtype", "shape", "layout", "device"):
        if getattr(given, asked) != getattr(expected, asked):
            return f"has {asked} {getattr(given, asked)}, not {getattr(expected, asked)}"
    if (
        case.strides
        and expected.layout == torch.strided
        and (why := _laid_otherwise(expected, given))
    ):
        return why
    return ""


def _far(expected: Tensor, given: Tensor, truth: Exact | None, place: int) -> str:
    """Say if the numbers are others than they should be."""
    if truth is not None and truth.leaves and expected.is_floating_point():
        return truth.farther(place, expected, given)
    tolerance = _TOLERANCE.get(expected.dtype, 1e-4)
    try:
        torch.testing.assert_close(
            given, expected, rtol=tolerance, atol=tolerance, equal_nan=True, check_stride=False
        )
    except (AssertionError, RuntimeError, TypeError, NotImplementedError) as error:
        return str(error).replace("\n", " ")[:300]
    return ""


def _laid_otherwise(expected: Tensor, given: Tensor) -> str:
    """Say if the strides differ where they mean something."""
    if expected.numel() == 0:
        return ""
    theirs = [
        step for step, size in zip(expected.stride(), expected.shape, strict=True) if size > 1
    ]
    ours = [step for step, size in zip(given.stride(), given.shape, strict=True) if size > 1]
    return "" if ours == theirs else f"has strides {given.stride()}, not {expected.stride()}"


def _other(expected: Any, given: Any) -> str:
    if type(given) is not type(expected):
        return f"holds a {type(given).__name__}, not a {type(expected).__name__}"
    same = given == expected or (given != given and expected != expected)
    close = isinstance(given, float) and math.isclose(given, expected, rel_tol=1e-5)
    plain = isinstance(given, (int, float, complex, str, bool, type(None), torch.dtype))
    return "" if same or close or not plain else f"is {given!r}, not {expected!r}"


def _shared(one: Answer) -> list[int]:
    """The places of the inputs in whose memory a part of the result lies."""
    inputs = [_memory(value) for value in pytree.tree_leaves(one.inputs)]
    outputs = {_memory(value) for value in pytree.tree_leaves(one.value)} - {None}
    return [place for place, memory in enumerate(inputs) if memory in outputs]


def _together(one: Answer) -> list[int]:
    """For each tensor of the result, the place of the first one in the same memory."""
    memories = [memory for memory in map(_memory, pytree.tree_leaves(one.value)) if memory]
    return [memories.index(memory) for memory in memories]


def _memory(value: Any) -> int | None:
    if not isinstance(value, Tensor) or value.layout != torch.strided or not value.numel():
        return None
    if value._is_zerotensor():
        return None  # A gradient that torch knows to be zero has no memory.
    return value.untyped_storage().data_ptr()


def _touched(case: Case, state: dict[str, Tensor]) -> str:
    for name, value in case.model.state_dict().items():
        if name not in state or not torch.equal(value.nan_to_num(), state[name].nan_to_num()):
            return f"the model's own {name} was changed"
    return ""


def own(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(pytree.tree_map_only(Tensor, _copy, value) for value in inputs)


def _copy(x: Tensor) -> Tensor:
    """`x` in memory of its own, with its strides: `clone` keeps them only where it is dense."""
    if x.layout != torch.strided or x.is_conj() or x.is_neg():
        return x.detach().clone()
    sizes = zip(x.shape, x.stride(), strict=True)
    extent = 1 + sum((size - 1) * step for size, step in sizes) if x.numel() else 0
    copied = x.detach().as_strided((extent,), (1,)).clone()
    return copied.as_strided(x.shape, x.stride())


def _alike(given: Exception, expected: Exception) -> bool:
    return isinstance(given, type(expected)) or isinstance(expected, type(given))


def _refusal(case: Case, error: nhwc.NhwcError, expected: Answer) -> tuple[str, str]:
    if expected.error is not None:
        return RIGHT, ""
    text = str(error).replace(_HERE, "")
    if isinstance(error, nhwc.VerificationError) and not case.unset:
        return WRONG, text[:300]
    return (REFUSED, text[:300]) if "\n" not in text else (FAILED, f"many lines: {text[:300]!r}")


def _said(error: Exception | None) -> str:
    lines = str(error).replace(_HERE, "").splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _kind(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
