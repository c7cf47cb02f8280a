"""A graph that takes tensors in lists, tuples and dicts, as one that takes these tensors alone.

A plan knows each input by its shape. Which list an input lies in is known once the call is: so
`x["image"]`, `len(features)` and `[*features, y]` are what a graph need not compute.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import fx

from ...errors import of_kind
from ...models.trees import can_be_remade, tuple_like
from ..modules.layers import assert_keys, assert_length
from .arguments import is_sayable_name
from .edit import filled
from .pickled import PickledGraph

_LOOKING = (operator.getitem, operator.add, getattr, len, assert_keys, assert_length)
_METHODS = ("get", "items", "keys", "values")
_HOLDERS = (list, tuple, dict)
_PLAIN = (int, float, bool, str, type(None))


class NotFlat(Exception):
    """The graph does more with what holds its inputs than to look for them."""


def is_nested(value: object) -> bool:
    """Whether this is a list, a tuple or a dict, of Python's own or named.

    >>> is_nested([1]), is_nested({"a": 1}), is_nested("a")
    (True, True, False)
    """
    known = (list, dict, OrderedDict)
    return isinstance(value, _HOLDERS) and (type(value) in known or can_be_remade(value))


def leaves_of(inputs: Sequence[Any]) -> Sequence[Any]:
    """What lies in `inputs`, in lists, tuples and dicts however deep, from left to right.

    >>> leaves_of((1, [2, {"a": 3}]))
    [1, 2, 3]
    """
    for value in inputs:
        if is_nested(value):
            return [*_leaves(inputs)]
    return inputs


def _leaves(held: Sequence[Any]) -> Iterator[Any]:
    for value in held:
        if not is_nested(value):
            yield value
        else:
            yield from _leaves([*value.values()] if isinstance(value, dict) else value)


def with_leaves(value: Any, leaf_of: Callable[[Any], Any]) -> Any:
    """Lists, tuples and dicts like those in `value`, with other leaves.

    >>> with_leaves((1, {"a": [2]}), str)
    ('1', {'a': ['2']})
    """
    if not is_nested(value):
        return leaf_of(value)
    if isinstance(value, dict):
        return type(value)((key, with_leaves(one, leaf_of)) for key, one in value.items())
    items = [with_leaves(one, leaf_of) for one in value]
    return items if isinstance(value, list) else tuple_like(value, items)


def flattened(graph: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, Sequence[Any]]:
    """A graph of the leaves of `inputs`, with the layers of `graph`, and these leaves.

    They are `graph` and `inputs` themselves where nothing is nested. Raises NotFlat for a graph
    that hands on what holds its inputs.
    """
    places = graph.graph.find_nodes(op="placeholder")
    open_ended = [str(place.target).startswith("*") and bool(place.users) for place in places]
    if not any(open_ended) and not any(map(is_nested, inputs)):
        return graph, inputs
    flat, known = fx.Graph(), dict[fx.Node, Any]()
    for number, (place, takes_all) in enumerate(zip(places, open_ended, strict=True)):
        if takes_all or number < len(inputs):
            given = _given(str(place.target), inputs[number:])
            known[place] = with_leaves(given, partial(_place, flat, place.name))
        else:
            known[place] = flat.node_copy(place)
    return _rest_copied(graph, flat, known), leaves_of(inputs)


def _given(name: str, left: Sequence[Any]) -> Any:
    """What an argument of this name gets of the inputs that are `left`."""
    if name.startswith("*") and not name.startswith("**"):
        return tuple(left)
    return left[0] if left else {}


def spelled(graph: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, Sequence[Any]]:
    """A copy of the graph with arguments for what `inputs` have in its `**kwargs`.

    Raises NotFlat where code cannot have arguments of these names.
    """
    flat, known, given = fx.Graph(), dict[fx.Node, Any](), [*inputs]
    for number, place in enumerate(graph.graph.find_nodes(op="placeholder")):
        if number >= len(inputs) or not str(place.target).startswith("**"):
            known[place] = flat.node_copy(place)
            continue
        more = given.pop()
        for name in more:
            if not is_sayable_name(name) or any(name == one.target for one in known):
                raise NotFlat(f"it takes an argument by the name {name!r}")
        known[place] = {name: flat.placeholder(name) for name in more}
        given += more.values()
    return _rest_copied(graph, flat, known), given


def _rest_copied(
    graph: fx.GraphModule, flat: fx.Graph, known: dict[fx.Node, Any]
) -> fx.GraphModule:
    """The graph whose inputs are those of `flat`, which `known` has for those of `graph`."""
    for node in graph.graph.nodes:
        if node.op != "placeholder":
            known[node] = _again(flat, node, known)
    result = PickledGraph(graph, flat, graph._get_name())
    result.training = graph.training
    return result


def _place(flat: fx.Graph, name: str, value: Any) -> Any:
    """A new input of the graph; a plain value stands for itself, and nobody reads its input."""
    place = flat.placeholder(name)
    place.target = place.name
    return value if type(value) in _PLAIN else place


def _again(flat: fx.Graph, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """The node in the graph of leaves, or what it finds where it looks into what holds them."""
    held = [one for one in node.all_input_nodes if is_nested(known[one])]
    if not held:
        return flat.node_copy(node, known.__getitem__)
    args, kwargs = filled((node.args, node.kwargs), known.__getitem__)
    if held == [*node.args[:1]]:
        keyed = isinstance(args[0], dict)
        if node.target in _LOOKING or (node.target is operator.contains and keyed):
            return node.target(*args, **kwargs)
        if node.op == "call_method" and node.target in _METHODS and keyed:
            found = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            return found if node.target == "get" else [*found]
    home = getattr(node.target, "__module__", None) or "torch"
    if node.op == "call_function" and home.startswith("torch"):
        return flat.node_copy(node, known.__getitem__)
    doing = "returns" if node.op == "output" else f"gives to {node.name}"
    raise NotFlat(f"it {doing} {of_kind(known[held[0]])} that it was given")
