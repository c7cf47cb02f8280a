"""Compute now, once, every value that depends on parameters and buffers alone."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from ..graph import attribute, called, clean, filled, fresh_name, targets_of
from ..graph.nodes.computed import is_computed_from_arguments
from ..graph.nodes.memory import exposed, memory_of
from ..graph.report import PassReport, Site
from ..machine.host_memory import apart
from ._folding_sites import name_of

_MADE = (torch.full,)
"""It costs less to make these constants at each call than to keep them. They are not stored, but
what is computed from them is."""


def fold_constants(gm: fx.GraphModule) -> PassReport:
    """Replace each computation on constants by its result, unless the graph writes into one."""
    constants: dict[fx.Node, None] = {}
    changing = exposed(gm.graph)
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            value = attribute(gm, str(node.target))
            constant = isinstance(value, Tensor) and not value.is_meta
        else:
            made = bool(node.all_input_nodes) or node.target in _MADE
            foldable = made and node not in changing and is_computed_from_arguments(node)
            constant = foldable and constants.keys() >= {*node.all_input_nodes}
        if constant:
            constants[node] = None
    written = next(filter(_writes_into_own, gm.graph.nodes), None)
    if written is not None:
        reason = f"{name_of(written)} writes into a parameter or buffer"
        return PassReport("fold_constants", (Site(name_of(written), "constants", False, reason),))
    sites = _fold(gm, constants)
    if sites:
        for node in reversed(constants):
            if not node.users:
                gm.graph.erase_node(node)
        clean(gm)
    return PassReport("fold_constants", tuple(sites))


def _fold(gm: fx.GraphModule, constants: dict[fx.Node, None]) -> list[Site]:
    """Compute `constants` in their order, and drop each value when nothing needs it any more."""
    sites = []
    values: dict[fx.Node, Any] = {}
    readers = {node: constants.keys() & node.users.keys() for node in constants}
    for node in constants:
        if node.op == "get_attr":
            value = attribute(gm, str(node.target)).detach()
        else:
            value = _evaluate(node, values)
            read = len(readers[node]) < len(node.users) and node.target not in _MADE
            if isinstance(value, Tensor) and read:
                sites.append(Site(name_of(node), "constant", True))
                _replace(gm, node, value, constants)
        if readers[node]:
            values[node] = value
        for made_of in node.all_input_nodes:
            readers[made_of].discard(node)
            if not readers[made_of]:
                del values[made_of]
    return sites


def _writes_into_own(node: fx.Node) -> bool:
    return any(one.op == "get_attr" for one in memory_of(*targets_of(node)))


def _evaluate(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args, kwargs = filled((node.args, node.kwargs), values.__getitem__)
    with torch.no_grad():
        return called(node, args, kwargs)


def _replace(
    gm: fx.GraphModule, node: fx.Node, value: Tensor, constants: Collection[fx.Node]
) -> None:
    """Store `value` as a buffer, and let every user of `node` that is no constant read that."""
    name = fresh_name(gm, f"{node.name}_constant")
    gm.register_buffer(name, apart(value.detach()))
    with gm.graph.inserting_before(node):
        constant = gm.graph.get_attr(name)
    constant.meta = dict(node.meta)
    node.replace_all_uses_with(constant, lambda user: user not in constants)
