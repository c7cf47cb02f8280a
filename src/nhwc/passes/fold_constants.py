"""What depends on parameters and buffers alone is computed now, once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ..graph import attribute, clean, fresh_name, written_into
from ..graph.report import PassReport, Site
from ._folding_sites import name_of

_RANDOM = ("rand", "normal", "bernoulli", "dropout", "multinomial", "poisson", "exponential")
_HOMES = ("torch", "_operator", "math")


def fold_constants(gm: fx.GraphModule) -> PassReport:
    """Replace each computation on constants by its result, unless the graph writes into one."""
    values: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            value = attribute(gm, str(node.target))
            if isinstance(value, Tensor) and not value.is_meta:
                values[node] = value.detach()
        elif _foldable(node) and node.all_input_nodes and set(node.all_input_nodes) <= set(values):
            values[node] = _evaluate(node, values)
    written = _written(gm.graph, values)
    if written is not None:
        reason = f"{name_of(written)} writes into a parameter or buffer"
        return PassReport("fold_constants", (Site(name_of(written), "constants", False, reason),))
    sites = []
    for node, value in values.items():
        if node.op == "get_attr" or not isinstance(value, Tensor):
            continue
        if all(user in values for user in node.users):
            continue
        sites.append(Site(name_of(node), "constant", True))
        _replace(gm, node, value)
    if any(site.applied for site in sites):
        clean(gm)
    return PassReport("fold_constants", tuple(sites))


def _foldable(node: fx.Node) -> bool:
    if any(user.op == "output" for user in node.users):
        return False  # Whoever calls may write into what he gets.
    if node.op == "call_method":
        name = str(node.target)
    elif node.op == "call_function":
        name = str(getattr(node.target, "__name__", ""))
        home = str(getattr(node.target, "__module__", None) or "torch")
        if home.split(".")[0] not in _HOMES and node.target is not getattr:
            return False
    else:
        return False
    return not name.startswith(_RANDOM) and written_into(node) is None


def _written(graph: fx.Graph, values: dict[fx.Node, Any]) -> fx.Node | None:
    for node in graph.nodes:
        target = written_into(node)
        # Several at once (`out=`) are none of these nodes, but may be made of them.
        if target is not None and (not isinstance(target, fx.Node) or target in values):
            return node  # type: ignore[no-any-return]
    return None


def _evaluate(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args = map_arg(node.args, lambda n: values[n])
    kwargs = map_arg(node.kwargs, lambda n: values[n])
    with torch.no_grad():
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)


def _replace(gm: fx.GraphModule, node: fx.Node, value: Tensor) -> None:
    name = fresh_name(gm, f"{node.name}_constant")
    gm.register_buffer(name, value.detach().clone(memory_format=torch.preserve_format))
    with gm.graph.inserting_before(node):
        constant = gm.graph.get_attr(name)
    constant.meta = dict(node.meta)
    node.replace_all_uses_with(constant)
