"""Which values may lie in one memory, and who may write there."""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from ..code.questions import may_write
from ..modules.layers import as_elements
from ..modules.leaves import hooks_of, is_leaf
from .edit import module_of
from .names import is_constant
from .results import returned
from .shapes import is_size
from .writes import may_be_view, result_may_be_view, targets_of

OF_OWN = "part_of_own"
"""Marks a part of a tensor of the model's own. What code reads of that is not in the graph."""


def shared(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose memory the result of `node` may share."""
    if is_size(node):
        return []
    if node.op == "call_module":
        # Passes add layers that no trace has seen.
        known = node.meta.get("may_return_input")
        return node.all_input_nodes if known or (known is None and result_may_be_view(node)) else []
    name = str(getattr(node.target, "__name__", node.target))
    if node.op == "call_method" and name in _LIKE_ANOTHER:
        return node.all_input_nodes[:1]
    if node.target is operator.getitem:
        # An index is read.
        return [one for one in node.args[:1] if isinstance(one, fx.Node)]
    # A view may be of any argument: the first of `einsum` is text, and some come by name.
    if may_be_view(node.target if node.op == "call_function" else name):
        return [value for value in node.all_input_nodes if not is_size(value)]
    return targets_of(node)


_LIKE_ANOTHER = ("to", "type_as", "view_as", "expand_as", "reshape_as")
"""They look at the type or shape of their second argument, and may return a view of the first."""


def memory_of(*nodes: fx.Node) -> set[fx.Node]:
    """Return `nodes`, and all in whose memory their results may lie.

    >>> graph = fx.symbolic_trace(lambda x: x.exp().view(-1).relu()[0]).graph
    >>> sorted(map(str, memory_of(graph.output_node().args[0])))
    ['getitem', 'relu']
    """
    found: set[fx.Node] = set()
    todo = [*nodes]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += shared(node)
    return found


def sharing(node: fx.Node) -> list[fx.Node]:
    """Return, in their order, `node` and all whose results may lie in one memory with its own."""
    found = memory_of(node)
    for other in node.graph.nodes:
        if not found.isdisjoint(shared(other)):
            found.add(other)
    return [one for one in node.graph.nodes if one in found]


def exposed(graph: fx.Graph) -> set[fx.Node]:
    """Return all in whose memory the caller, or the graph itself, may write."""
    return memory_of(*returned(graph), *(one for node in graph.nodes for one in _written(node)))


def overwritten(values: Collection[fx.Node], first: fx.Node, last: fx.Node) -> fx.Node | None:
    """Return a node behind `first`, up to `last`, that may write into one of `values`.

    Whoever reads them at `last`, and not at `first`, must ask. What comes from outside of the graph
    may be one tensor under several names.
    """
    node = first
    while node is not last:
        node = node.next
        written = memory_of(*_written(node))
        for value in values:
            memory = memory_of(value) if written and value < node else set()
            if written & memory or (any(map(_is_outer, written)) and any(map(_is_outer, memory))):
                return node
    return None


def seen_later(
    write: fx.Node, order: dict[fx.Node, int] | None = None, *, besides: fx.Node | None = None
) -> bool:
    """Whether anything but the result of `write`, and the value `besides`, shows what it wrote.

    `order` has the place of each node in the graph, for callers who ask about many.
    """
    order = order or {node: place for place, node in enumerate(write.graph.nodes)}
    found, todo = {write}, [destination(write)]
    while todo:
        node = todo.pop()
        if not isinstance(node, fx.Node) or node in found:
            continue
        if node.op in ("placeholder", "get_attr") and not is_constant(node):
            return True
        if node.meta.get(OF_OWN):
            return True
        later = {user for user in node.users if order[user] > order[write]}
        views = [user for user in node.users if node in shared(user)]
        if node is besides:
            # What is made of it later is made of the result.
            views = [user for user in views if user not in later]
        elif not all(map(is_size, later)):
            return True
        found.add(node)
        todo += [*shared(node), *views]
    return False


def destination(write: fx.Node) -> Any:
    """What `write` writes into; `x[:] = y` is said as y in the shape of x.

    Parts of complex numbers are put into the real numbers that they are made of.
    """
    if write.target is torch.view_as_complex:
        real = write.args[0].args[0]  # type: ignore[union-attr]
        return real.args[0].args[0]  # type: ignore[union-attr]
    return write.args[1] if write.target is as_elements else write.args[0]


def _written(node: fx.Node) -> list[fx.Node]:
    """What `node` writes into; all that it is given, if that is code which no graph shows."""
    module = module_of(node)
    if module is not None and (not is_leaf(module) or any(map(may_write, hooks_of(module)))):
        return node.all_input_nodes
    return targets_of(node)


def _is_outer(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")
