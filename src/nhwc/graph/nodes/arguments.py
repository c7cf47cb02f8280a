"""The arguments of a `forward` in a graph: which become inputs, and under which names and types."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, fx, nn

from ...models.places import in_order, is_open_ended, places
from ..modules.layers import assert_none
from ..plain import is_derived
from .names import is_sayable


def fixed_arguments(module: nn.Module, calls: Sequence[tuple[Any, ...]] = ()) -> dict[str, Any]:
    """Return the optional arguments of `forward` that are plain, which user code branches on.

    They are fixed to what all `calls` give for them, or to their defaults. The first argument is
    the model's input, even if its default is None. A graph does not branch: it has its own guards.
    """
    if isinstance(module, fx.GraphModule) and not calls:
        return {}
    signature = inspect.signature(module.forward)
    given = [_by_name(signature, call) for call in calls] or [{}]
    fixed: dict[str, Any] = {}
    for place, (name, parameter) in enumerate(signature.parameters.items()):
        if parameter.default is parameter.empty:
            continue
        value, *others = [arguments.get(name, parameter.default) for arguments in given]
        # The guard that torch.fx puts in front of a graph compares these types, and no others.
        plain = type(value) in _PLAIN and (place or value is not None)
        if plain and all(type(other) is type(value) and other == value for other in others):
            fixed[name] = value
    return fixed


def given_by_decorator(function: Any) -> str:
    """The optional argument that a decorator of `function` names, and may give itself.

    Empty if there is none. A call that gives what the function takes by default would be another.

    >>> import functools
    >>> def forward(x, scale=1.0): ...
    >>> def tripled(*args, **more):
    ...     return forward(*args, **{"scale": 3.0, **more})
    >>> given_by_decorator(functools.wraps(forward)(tripled)), given_by_decorator(forward)
    ('scale', '')
    """
    inner = inspect.unwrap(function)
    parameters = inspect.signature(inner).parameters.values()
    optional = {one.name for one in parameters if one.default is not one.empty}
    while hasattr(function, "__wrapped__"):
        code = getattr(function, "__code__", None)
        said = optional & {*code.co_varnames, *_texts(code.co_consts)} if code else set[str]()
        if said and function.__globals__.get("__name__", "").split(".")[0] not in _RETURNING:
            return min(said)
        function = function.__wrapped__
    return ""


_RETURNING = ("transformers", "diffusers")
"""Packages whose decorators name arguments that say how results are returned."""


def _texts(constants: tuple[Any, ...]) -> Iterator[str]:
    for one in constants:
        if isinstance(one, tuple):
            yield from _texts(one)
        elif isinstance(one, str):
            yield one


def _by_name(signature: inspect.Signature, call: tuple[Any, ...]) -> dict[str, Any]:
    names = places(signature)
    # A `__call__` of the model's own takes others than its `forward`.
    fits = len(call) <= len(names) or is_open_ended(signature)
    return dict(zip(names, call, strict=False)) if fits else {}


def type_like(value: object) -> Any:
    """The type that TorchScript is to take an argument for that may be `value`.

    It takes an argument without a type for a tensor, which is never None.
    """
    return type(value) if type(value) in (bool, int, float, str) else _TENSOR_OR_NONE


def name_placeholders(graph: fx.Graph, module: nn.Module) -> None:
    """Give every argument of the graph the name and the type that `forward` declares for it.

    The result gets no type: code without branches returns one, and TorchScript infers it.
    """
    graph.output_node().type = None
    try:
        types = typing.get_type_hints(type(module).forward)
    except Exception:
        types = {}
    signature = inspect.signature(type(module).forward)
    declared, late = in_order(signature)[1:], required_late(signature)
    for node, parameter in zip(graph.find_nodes(op="placeholder"), declared, strict=False):
        name = parameter.name
        if not node.target.startswith("*"):
            node.target = name
        if name in late:
            node.args = (None,)
        optional = name in late or parameter.default is None
        node.type = types.get(name, type_like(None) if optional else None)
    for node in graph.find_nodes(op="call_function", target=_FIXED_TO_NONE):
        node.target = assert_none
        # TorchScript takes any other type for one that is never None.
        node.all_input_nodes[0].type = _TENSOR_OR_NONE


_TENSOR_OR_NONE = typing.Optional[Tensor]  # noqa: UP045

# Some versions of torch.fx have this function; TorchScript cannot compile it.
_FIXED_TO_NONE = getattr(fx._symbolic_trace, "_assert_is_none", None)


def required_late(signature: inspect.Signature) -> frozenset[str]:
    """The arguments that have no default, and stand in generated code behind one that has.

    It has no keyword-only arguments, so these are None there if they are left out.

    >>> sorted(required_late(inspect.signature(lambda x, mask=None, *, scale: x)))
    ['scale']
    """
    found, optional = set(), False
    for one in in_order(signature):
        optional = optional or one.default is not one.empty
        if optional and one.default is one.empty and one.kind is one.KEYWORD_ONLY:
            found.add(one.name)
    return frozenset(found)


def is_sayable_argument(parameter: inspect.Parameter) -> bool:
    """Whether generated code can have an argument of this name and this default."""
    default = parameter.default
    values = default if type(default) in (list, tuple) else (default,)
    plain = all(isinstance(one, _PLAIN) and not is_derived(one) for one in values)
    return (plain or default is parameter.empty) and is_sayable_name(parameter.name)


def is_sayable_name(name: str) -> bool:
    """Whether generated code can have an argument of this name."""
    return name.isidentifier() and is_sayable(name) and name not in _SAID


_SAID = {
    *("self", "getattr", "torch", "device", "inf", "nan", "NoneType", "pytree", "fx_pytree"),
    *("slice", "range", "operator", "math", "nhwc"),
}
"""Generated code uses these names itself."""

_PLAIN = (type(None), bool, int, float, str)
