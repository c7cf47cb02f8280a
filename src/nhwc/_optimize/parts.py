"""Is a model right that decides by values: one that sorts, drops and counts what it found?

Two such models may round differently in the last digit, and answer with other boxes. So where the
whole answers otherwise, and is code of the user's own around parts that were rewritten, each part
is held against the original's on what the original's was given. Then the code around them runs with
the original's answers in place of the parts': it must come to the very same end. A model without
such parts is held against the original with what that picked (`verify.decided`), or must answer as
the original does in its own precision, but where that answers otherwise a rounding away, too. So
must one whose copy in float64 computes something else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graph import graphs, is_one_call
from ..models.preserve import copy_as_is, preserved
from ..models.trees import flatten
from ..optimized import Optimized
from ..verify import Answers, Verification, answer, cloned, doubled, verify
from ..verify.comparing import Check, compare, numbers
from ..verify.decided import judged_as_whole
from ..verify.luck import without_luck


def verify_or_parts(truth: Answers, model: nn.Module, after: nn.Module) -> Verification:
    """Hold `after` against `model` as a whole; part by part if that fails or has nothing to say."""
    found = without_luck(verify(truth, after), truth, model)
    told = any(_count(value) for answers in truth.answers for value in answers.values())
    if found.passed and told and not found.astray:
        return found
    parts = _parts(after)
    if not parts:
        return judged_as_whole(found, truth, model, after)
    if isinstance(after, Optimized) and any(map(after.serves, truth.inputs)):
        # Its program calls no parts that could be watched.
        reason = "it is planned as a whole, and the model's own answer says too little of that"
        unsaid = Check(0, "output", 1.0, 0.0, 0.0, reason)
        return dataclasses.replace(found, checks=(*found.checks, unsaid))
    checks = [
        check
        for index, inputs in enumerate(truth.inputs)
        for check in _by_parts(index, model, after, parts, inputs)
    ]
    return Verification(tuple(checks))


def _count(value: object) -> int:
    """Count the numbers to compare; a detector that finds nothing returns empty tensors."""
    found = numbers(value)
    return found.numel() if isinstance(found, Tensor) else 0


def _parts(after: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost graphs in a model that could not be traced as a whole, by their path."""
    after = after.portable if isinstance(after, Optimized) else after
    if not isinstance(after, fx.GraphModule) or not is_one_call(after):
        return {}
    planned = {m.portable: m for m in after.modules() if isinstance(m, Optimized)}
    found = {path: planned.get(part, part) for path, part in graphs(after) if part is not after}
    return {
        path: part
        for path, part in found.items()
        if not any(path.startswith(f"{other}.") for other in found)
    }


def _by_parts(
    index: int,
    model: nn.Module,
    after: nn.Module,
    parts: dict[str, nn.Module],
    inputs: tuple[Any, ...],
) -> Iterator[Check]:
    checks: list[Check] = []
    calls: dict[str, list[Any]] = {path: [] for path in parts}

    def note(path: str) -> Any:
        # A part may write into what it is given.
        def given(_: nn.Module, args: Any, kwargs: Any) -> None:
            calls[path].append(cloned((args, kwargs)))

        def made(_: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            calls[path].append(cloned(result))

        return given, made

    def hold(path: str) -> Any:
        wide = copy_as_is(model.get_submodule(path)).double()

        def hook(_: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
            if not calls[path]:
                checks.append(Check(index, path, 1.0, 0.0, 0.0, "it is called more often"))
                return result
            args, kwargs = doubled(calls[path].pop(0))
            before = calls[path].pop(0)
            was, now, exact = (
                dict(flatten(x, path)) for x in (before, result, wide(*args, **kwargs))
            )
            checks.extend(compare(index, was, now, exact, True))
            return before

        return None, hook

    with preserved(model), torch.no_grad():
        before = _hooked(model, {model.get_submodule(p): note(p) for p in parts}, inputs)
        replayed = _hooked(after, {part: hold(path) for path, part in parts.items()}, inputs)
    yield from checks
    yield from compare(index, before, replayed, before, False)
    for path, left in calls.items():
        if left:
            yield Check(index, path, 1.0, 0.0, 0.0, "it is called less often")


def _hooked(model: nn.Module, hooks: dict[nn.Module, Any], inputs: tuple[Any, ...]) -> Any:
    with ExitStack() as stack:
        for module, (given, made) in hooks.items():
            if given is not None:
                before = module.register_forward_pre_hook(given, with_kwargs=True)
                stack.callback(before.remove)
            behind = module.register_forward_hook(made, with_kwargs=True)
            stack.callback(behind.remove)
        return answer(model, inputs)
