"""Which values may lie in one memory, and who may write there."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from .edit import module_of
from .leaves import hooks_of, is_leaf
from .questions import may_write
from .results import returned
from .traced import shared
from .writes import targets_of


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


def _written(node: fx.Node) -> list[fx.Node]:
    """What `node` writes into; all that it is given, if that is code which no graph shows."""
    module = module_of(node)
    if module is not None and (not is_leaf(module) or any(map(may_write, hooks_of(module)))):
        return node.all_input_nodes
    return targets_of(node)


def _is_outer(node: fx.Node) -> bool:
    return node.op in ("placeholder", "get_attr")
