"""A graph node as a function of its tensor inputs alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx, nn

from ..graph import filled
from ..graph.layers import LAYERS
from .recording import Record
from .specs import Layer


def caller(graph: fx.GraphModule, record: Record, layer: Layer) -> Callable[..., Any]:
    """The function that calls what `layer`'s node calls, on the values of `layer.inputs`.

    Arguments that the record showed to be fixed are filled in here, once.
    """
    node = layer.node
    function = _function(graph, node)
    args, kwargs = fx.node.map_arg(
        (node.args, node.kwargs), lambda n: record.values[n] if n in record.fixed else n
    )
    if not kwargs and args[: len(layer.inputs)] == layer.inputs:
        constants = args[len(layer.inputs) :]
        if not any(_holds_node(value) or isinstance(value, list) for value in constants):
            if not constants:
                return function
            return lambda *inputs: function(*inputs, *constants)

    def call(*inputs: Any) -> Any:
        given = dict(zip(layer.inputs, inputs, strict=True))
        a, k = filled((args, kwargs), given.__getitem__)
        return function(*a, **k)

    return call


def is_opaque(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Whether the node calls a user's module that could not be looked into."""
    if node.op != "call_module":
        return False
    module = graph.get_submodule(str(node.target))
    return not (isinstance(module, LAYERS) or type(module).__module__.startswith("torch.nn."))


def _function(graph: fx.GraphModule, node: fx.Node) -> Callable[..., Any]:
    if node.op == "call_method":
        name = str(node.target)
        return lambda self, *args, **kwargs: getattr(self, name)(*args, **kwargs)
    if node.op == "call_module":
        module = graph.get_submodule(str(node.target))
        hooks = (module._forward_hooks, module._forward_pre_hooks)
        # Without hooks, forward is all that a call does, and a call costs a microsecond more.
        plain = isinstance(module, nn.Module) and not any(hooks)
        return module.forward if plain else module
    assert callable(node.target)
    return node.target


def _holds_node(value: Any) -> bool:
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)  # type: ignore[arg-type]
    return bool(found)
