"""Sums that repeat one of their operands, taken out of the layer that a pass had put them into.

A pass sees no shapes: to it the other operand of a sum is a residual. Kernels add residuals where
they store, number by number; a time embedding of N, C, 1, 1, or the offset that a gate computes, is
none. For such shapes the layer is called alone again, with the sum and the activation behind it.
"""

from __future__ import annotations

import operator

from torch import fx

from ..graph import module_of
from ..graph.layers import Fused
from ..graph.leaves import opaque_by_nature
from .recognize import specified
from .recording import Record


def parted(graph: fx.GraphModule, record: Record) -> fx.GraphModule | None:
    """`graph` with the layers alone whose sums repeat an operand; None if none does."""
    repeating = [node for node in graph.graph.nodes if _repeats(record, node)]
    if not repeating:
        return None
    copied = fx.Graph()
    named: dict[fx.Node, fx.Node] = {}
    copied.output(copied.graph_copy(graph.graph, named))  # type: ignore[arg-type]
    for node in repeating:
        _part(copied, named[node], activates=module_of(node).activation is not None)  # type: ignore[union-attr]
    return fx.GraphModule(graph, copied)


def _repeats(record: Record, node: fx.Node) -> bool:
    fused = module_of(node)
    if not isinstance(fused, Fused) or len(node.args) != 2 or node.kwargs:
        return False
    out, *given = (record.tensor(one) for one in (node, *node.all_input_nodes))
    if out is None or None in given or opaque_by_nature(fused) is not None:
        return False
    x, residual = given[0], given[-1]
    if residual.shape != out.shape:  # type: ignore[union-attr]
        return True
    alone = specified(fused.op, x)  # type: ignore[arg-type]
    return alone is not None and alone.output != out.shape


def _part(graph: fx.Graph, node: fx.Node, *, activates: bool) -> None:
    """Call the layer of a `Fused` module, the sum and the activation, each by itself."""
    x, residual = node.args
    with graph.inserting_before(node):
        result = graph.call_module(f"{node.target}.op", (x,))
        result = graph.call_function(operator.add, (result, residual))
        if activates:
            result = graph.call_module(f"{node.target}.activation", (result,))
    node.replace_all_uses_with(result)
    graph.erase_node(node)
