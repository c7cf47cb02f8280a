"""Is a model right that picks by values, and was rewritten as a whole?

A detector picks its best three hundred boxes. Where two scores differ by less than a rounding, two
right models pick them in another order, and all that is computed from them differs. So the original
runs once more, and each of its decisions is noted. Then the other runs, and the original in
float64, with these decisions in the place of their own:

    original    x -> scores -> topk -> boxes        what was decided on, and how
                                |
    the other   x -> scores'    +----> boxes'       scores' are held against scores, boxes' to boxes
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..models.modes import OperatorMode
from . import DECIDES, Answers, Verification, answer, cloned, doubled, verify
from .comparing import Check, compare, shapes
from .luck import by_jumps, proves_nothing
from .picking import picks
from .widened import run_in_float64


@dataclass(frozen=True)
class _Decision:
    """A call that picks: what, of which shapes and settings, on which numbers, and its result."""

    what: tuple[Any, ...]
    numbers: dict[str, Any]
    result: Any


def judged_as_whole(
    found: Verification, truth: Answers, model: nn.Module, after: Callable[..., Any]
) -> Verification:
    """`found`, of all that `after` answers, or what can be said where that says nothing.

    It is held against `model` with the decisions of that; or in its own precision, if what the copy
    in float64 decides or computes is something else; and by how far `model` itself jumps nearby.
    """
    own = proves_nothing(found, truth, model)
    if own or not found.passed:
        apart = verify_decided(truth, model, after)
        if apart and apart.passed:
            return apart
    if own and found.passed:
        found = verify(replace(truth, exact=None), after)
    return found if found.passed else by_jumps(found, truth, model)


def verify_decided(
    truth: Answers, model: nn.Module, after: Callable[..., Any]
) -> Verification | None:
    """Hold `after` against `model` with the decisions of that; None if it makes none.

    None, too, if that is far from its own float64 run even so.
    """
    checks: list[Check] = []
    for index, inputs in enumerate(truth.inputs):
        with _Noting() as original:
            before = answer(model, inputs)
        if not original.made:
            return None
        exact, wide = _in_float64(model, inputs, original.made)
        if exact is not None and shapes(exact) != shapes(before):
            exact = None
        with _Deciding(original.made) as other:
            now = answer(after, inputs)
        for number, noted in other.found.items():
            was = original.made[number].numbers
            own = was if exact is None else wide[number].numbers
            checks += compare(index, was, noted.numbers, own, exact is not None)
        if other.lost:
            reason = f"it decides by {other.lost} where the original does not"
            checks.append(Check(index, "output", 1.0, 0.0, 0.0, reason))
        checks += compare(index, before, now, exact or before, exact is not None)
    found = Verification(tuple(checks))
    return None if found.astray else found


def _in_float64(
    model: nn.Module, inputs: tuple[Any, ...], decisions: list[_Decision]
) -> tuple[dict[str, Any] | None, dict[int, _Decision]]:
    """What the original answers in float64 with these decisions, and what it decides on there."""

    def run(copy: nn.Module) -> tuple[dict[str, Any], _Deciding]:
        with _Deciding(decisions) as seen:
            return answer(copy, doubled(inputs)), seen

    # A user's forward may raise anything in a precision that it was not written for.
    with contextlib.suppress(Exception):
        found, seen = run_in_float64(model, run)
        if len(seen.found) == len(decisions) and not seen.lost:
            return found, seen.found
    return None, {}


class Picking(OperatorMode):
    """A mode that minds picks alone: programs run under it, since none of their kernels picks."""


class _Noting(Picking):
    """Notes each decision that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[_Decision] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if picks(func):
            self.made.append(_decision(func, args, kwargs or {}, len(self.made), result))
        return result


class _Deciding(Picking):
    """Puts decisions that were noted in the place of those that are made, in their order.

    `found` has those that were asked for, on the numbers of this run; `lost` is what was not noted.
    """

    def __init__(self, decisions: list[_Decision]) -> None:
        super().__init__()
        self._left = iter(enumerate(decisions))
        self.found: dict[int, _Decision] = {}
        self.lost = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not picks(func):
            return func(*args, **(kwargs or {}))
        mine = _decision(func, args, kwargs or {})
        # Of a decision that nobody reads, a program makes none.
        number, noted = next((n for n in self._left if n[1].what == mine.what), (0, None))
        if noted is None:
            self.lost = func._overloadpacket.__name__
            return func(*args, **(kwargs or {}))
        numbers = dict(zip(noted.numbers, mine.numbers.values(), strict=True))
        self.found[number] = _Decision(noted.what, numbers, noted.result)
        return _as_decided(func, args, kwargs or {}, noted.result)


def _decision(
    func: Any, args: Any, kwargs: dict[str, Any], number: int = 0, result: Any = None
) -> _Decision:
    given = tree_leaves((args, kwargs))
    tensors = [one for one in given if isinstance(one, Tensor)]
    name = func._overloadpacket.__name__
    settings = [repr(one) for one in given if not isinstance(one, Tensor)]
    what = (name, *(tuple(tensor.shape) for tensor in tensors), *settings)
    numbers = {
        f"{DECIDES} {name} {number} decides on" + ", too" * place: tensor.clone()
        for place, tensor in enumerate(tensors)
    }
    return _Decision(what, numbers, cloned(result))


def _as_decided(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
    """The noted result: the same places, with the numbers that are there in this run."""
    x, result = args[0], cloned(result)
    if isinstance(result, Tensor):
        return result.to(x.dtype) if result.is_floating_point() else result
    *_, places = result
    given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
    dim = given.get("dim", -1)
    kept = places.dim() == x.dim()
    found = x.gather(dim, places if kept else places.unsqueeze(dim))
    return found if kept else found.squeeze(dim), places
