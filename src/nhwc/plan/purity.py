"""Whether a graph may be planned: its nodes must do nothing but return values.

A plan gives every value a layout of its own, by copying where needed. A node that writes into
another node's value would write into the copy.
"""

from __future__ import annotations

from torch import fx

from ..graph import may_be_view, written_into
from ..graph.shapes import SHAPE_ATTRIBUTES, SHAPE_METHODS


def why_impure(graph: fx.GraphModule) -> str | None:
    """Why `graph` cannot be planned, or None if it can.

    Writing into a value that nobody else can see is no harm, and `ReLU(inplace=True)` right behind
    its convolution is the commonest case of all.
    """
    for node in graph.graph.nodes:
        if node.op == "placeholder" and str(node.target).startswith("*"):
            return f"it takes a varying number of arguments ({node.target})"
        target = written_into(node)
        reason = None if target is None else why_seen(graph, node, target)
        if reason is not None:
            return reason
    return None


def why_seen(graph: fx.GraphModule, node: fx.Node, target: object) -> str | None:
    """Why something else may see that `node` writes into `target`, or None if nothing can."""
    if not isinstance(target, fx.Node) or target.op in ("placeholder", "get_attr"):
        return f"{node.name} writes into {target}, which outlives the call"
    readers = [user for user in target.users if user is not node and not _asks_shape(user)]
    if readers or _may_be_view(graph, target):
        return f"{node.name} writes into {target.name}, which others may read"
    return None


def _asks_shape(node: fx.Node) -> bool:
    """Whether `node` reads what no write changes: timm's norms assert the dimensions they get."""
    if node.op == "call_method":
        return node.target in SHAPE_METHODS
    return node.target is getattr and node.args[1] in SHAPE_ATTRIBUTES


def _may_be_view(graph: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        return may_be_view(type(graph.get_submodule(str(node.target))).__name__)
    return may_be_view(str(getattr(node.target, "__name__", node.target)))
