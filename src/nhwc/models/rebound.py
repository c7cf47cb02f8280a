"""Functions that a model holds, hooks above all, for a copy of it: deepcopy copies no functions.

A hook may enclose its model, and put there what the model reads. That of a copy must not put it
into the model that was copied. Hooks and `forward` may as well put it into a global dict, which the
model has as an attribute; then the copy has that very dict.
"""

from __future__ import annotations

import functools
import inspect
import operator
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from .trees import CONTAINERS

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def kept_outside(module: nn.Module) -> Iterator[Any]:
    """Yield the global containers that hooks or the `forward` of `module` name."""
    hooks = [hook for kind in HOOKS for hook in vars(module)[kind].values()]
    # That of a scripted module has no function, and says so by an error.
    for called in (*hooks, inspect.getattr_static(type(module), "forward")):
        function = getattr(called, "__func__", called)
        if isinstance(function, types.FunctionType):
            named = map(function.__globals__.get, function.__code__.co_names)
            yield from (value for value in named if isinstance(value, CONTAINERS))


def rebind(module: nn.Module, memo: dict[int, Any]) -> None:
    """Let functions stored on a copied module enclose the copy."""
    for held in (vars(module), *(vars(module)[kind] for kind in HOOKS)):
        for key, function in list(held.items()):
            if isinstance(function, _FUNCTIONS):
                held[key] = _rebound(function, memo)


_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)


def _rebound(value: Any, memo: dict[int, Any]) -> Any:
    """The copy of what lies in the model; a function that holds copies where `value` holds these.

    A `forward` set from outside most often holds the method that was there before.
    """
    kinds = (nn.Module, Tensor, types.FunctionType, *CONTAINERS)
    if isinstance(value, kinds) and id(value) in memo:
        return memo[id(value)]
    if isinstance(value, types.MethodType):
        function, owner = _rebound(value.__func__, memo), _rebound(value.__self__, memo)
        same = function is value.__func__ and owner is value.__self__
        return value if same else types.MethodType(function, owner)
    if isinstance(value, functools.partial):
        return _rebound_partial(value, memo)
    return _rebound_function(value, memo) if isinstance(value, types.FunctionType) else value


def _rebound_partial(value: functools.partial[Any], memo: dict[int, Any]) -> Any:
    given = (value.func, *value.args, *value.keywords.values())
    copied = [_rebound(one, memo) for one in given]
    if all(map(operator.is_, copied, given)):
        return value
    count = len(value.args) + 1
    named = dict(zip(value.keywords, copied[count:], strict=True))
    result = functools.partial(copied[0], *copied[1:count], **named)
    vars(result).update(vars(value))
    return result


def _rebound_function(value: types.FunctionType, memo: dict[int, Any]) -> Any:
    memo[id(value)] = value  # It may hold itself.
    cells, named = value.__closure__ or (), value.__kwdefaults__ or {}
    given = (*(value.__defaults__ or ()), *named.values())
    enclosed = tuple(_enclosed(cell, memo) for cell in cells)
    copied = [_rebound(one, memo) for one in given]
    if all(map(operator.is_, (*enclosed, *copied), (*cells, *given))):
        return value
    code, space, name = value.__code__, value.__globals__, value.__name__
    defaults = tuple(copied[: len(copied) - len(named)])
    result = types.FunctionType(code, space, name, defaults, enclosed)
    result.__kwdefaults__ = dict(zip(named, copied[len(defaults) :], strict=True))
    vars(result).update(vars(value))
    memo[id(value)] = result
    return result


def _enclosed(cell: types.CellType, memo: dict[int, Any]) -> types.CellType:
    """Return a cell with the copy of what is in `cell`, or `cell` itself."""
    try:
        inside = cell.cell_contents
    except ValueError:  # The cell is not filled yet.
        return cell
    copied = _rebound(inside, memo)
    return cell if copied is inside else types.CellType(copied)
