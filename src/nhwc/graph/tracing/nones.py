"""Where code asks whether a value is None that may be: no class can define the answer.

An argument of the user's may be any other object as well, True or an enum's member, that code asks
for in the same way.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Collection
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, fx, nn

from ..code.questions import asks_for_none, assigned_in
from ..code.reached import OURS, TORCH, methods_of, takes_module

CERTAIN = "is None or the like"
"""What code asks by `is`."""

_OF_WINDOWS = ("window_reverse", "grid_reverse")
"""Functions of timm that make an image of its windows. What others are declared to return they need
not: one that is declared to return a tensor returns the None that it was given.
"""


def argument_asked(module: nn.Module) -> str:
    """The argument that the code of a part asks for None, or the like; empty if there is none."""
    function = module.forward
    code = getattr(function, "__code__", None)
    if isinstance(module, fx.GraphModule) or code is None:
        return ""
    asked = asks_for_none(code, function.__globals__, method=True, or_another=True)
    given = {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}
    return min(asked & given, default="")


def arguments_asked(root: nn.Module, concrete: dict[str, Any]) -> tuple[str, str]:
    """Why code must not be traced whose callers may give None, and why perhaps not.

    It asks for an argument besides the first that is not `concrete`; or it asks by another name, or
    in a method to which it may pass the argument on.
    """
    code = getattr(root.forward, "__code__", None)
    parameters = inspect.signature(root.forward).parameters.values()
    # What `*args` and `**kwargs` hold is never None.
    single = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = [name for name in single if name not in concrete][1:]
    if isinstance(root, fx.GraphModule) or code is None or not names:
        return "", ""
    asked = asks_for_none(code, root.forward.__globals__, method=True, or_another=True)
    asked -= {*concrete}
    if asked & {*names}:
        return f"it asks whether its argument {min(asked & {*names})} {CERTAIN}", ""
    if code.co_filename.startswith((TORCH, OURS)):
        return "", ""
    other = "by another name" if asked else _asking_method(root, code, or_another=True)
    return "", f"it may ask {other} whether its argument {names[0]} {CERTAIN}" if other else ""


def result_asked(frame: FrameType) -> bool:
    """Whether the code of this frame, or a method it may pass it on to, asks for what it calls."""
    code = frame.f_code
    module: Any = frame.f_locals.get(code.co_varnames[0]) if code.co_varnames else None
    method = isinstance(module, nn.Module)
    asked = asks_for_none(code, frame.f_globals, method=method)
    known = "" in asked or bool(asked & assigned_in(code))
    return known or (method and bool(_asking_method(module, code)))


def _asking_method(module: nn.Module, code: CodeType, *, or_another: bool = False) -> str:
    """In which method of `module`, other than this one, it asks whether a value is None."""
    for other in methods_of(module):
        method = takes_module(module, other)
        if other.__code__ is not code and asks_for_none(
            other.__code__, other.__globals__, method=method, or_another=or_another
        ):
            return f"in {other.__name__}"
    return ""


def may_be_none(
    node: fx.Node, opaque: Collection[str], owner_may: Callable[[fx.Node], bool]
) -> bool:
    """Whether `node` may return None: `opaque` parts may, and a part of what `owner_may` tells."""
    if node.op == "placeholder":
        return node.prev.op == "placeholder"  # The first argument is the model's input.
    if node.op == "call_module":
        return node.target in opaque
    if node.op == "call_method":
        return not hasattr(Tensor, str(node.target))
    if node.target in (operator.getitem, getattr):
        owner, key = node.args[:2]
        of_input = isinstance(owner, fx.Node) and owner.op == "placeholder"
        inside = isinstance(owner, fx.Node) and owner_may(owner)
        return inside or (of_input and isinstance(key, str) and not hasattr(Tensor, key))
    home = getattr(node.target, "__module__", None) or "torch"
    known = home.startswith(("torch", "_operator", "builtins", "math", "nhwc", "einops"))
    name = getattr(node.target, "__name__", "")
    known = known or (home.startswith("timm.") and name.startswith(_OF_WINDOWS))
    return node.op == "call_function" and not known
