"""The arguments of a `forward` in a graph: which become inputs, and under which names and types."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from .layers import assert_none
from .plain import is_derived


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


def _by_name(signature: inspect.Signature, call: tuple[Any, ...]) -> dict[str, Any]:
    try:
        return signature.bind_partial(*call).arguments
    except TypeError:
        # A `__call__` of the model's own takes others than its `forward`.
        return {}


def by_place(
    forward: Callable[..., Any], inputs: Sequence[Any], named: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    """All arguments in their order, with defaults for those between that are left out.

    >>> def forward(x, mask=None, size=8, *, scale=1): ...
    >>> by_place(forward, (1,), {"size": 4}), by_place(forward, (1,), {"scale": 4})
    ((1, None, 4), None)

    None if an argument has no place.
    """
    signature = inspect.signature(forward)
    placed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [one.name for one in signature.parameters.values() if one.kind in placed]
    try:
        bound = signature.bind(*inputs, **named)
    except TypeError:
        return None
    if not names or not named.keys() <= {*names}:
        return None
    bound.apply_defaults()
    last = max(map(names.index, named), default=0)
    return tuple(bound.args[: max(len(inputs), last + 1)])


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
    declared = list(inspect.signature(type(module).forward).parameters.values())[1:]
    for node, parameter in zip(graph.find_nodes(op="placeholder"), declared, strict=False):
        name = parameter.name
        if not node.target.startswith("*"):
            node.target = name
        node.type = types.get(name, type_like(None) if parameter.default is None else None)
    for node in graph.find_nodes(op="call_function", target=_FIXED_TO_NONE):
        node.target = assert_none
        # TorchScript takes any other type for one that is never None.
        node.all_input_nodes[0].type = _TENSOR_OR_NONE


_TENSOR_OR_NONE = typing.Optional[Tensor]  # noqa: UP045

# Some versions of torch.fx have this function; TorchScript cannot compile it.
_FIXED_TO_NONE = getattr(fx._symbolic_trace, "_assert_is_none", None)


def is_sayable_argument(parameter: inspect.Parameter) -> bool:
    """Whether generated code can have an argument of this name and this default."""
    default = parameter.default
    plain = default is parameter.empty or (isinstance(default, _PLAIN) and not is_derived(default))
    return plain and parameter.name not in _SAID


_SAID = {
    *("self", "getattr", "torch", "device", "inf", "nan", "NoneType", "pytree", "fx_pytree"),
    *("slice", "range", "operator", "math", "nhwc"),
}
"""Generated code uses these names itself."""

_PLAIN = (type(None), bool, int, float, str)
