"""Remove what nothing uses any more."""

from __future__ import annotations

from torch import fx

from .writes import written_into


def erase_unused(node: object) -> None:
    """Remove `node`, and all that it alone was computed from, if nothing uses it any more.

    What writes into a value has an effect, and stays.
    """
    if (
        not isinstance(node, fx.Node)
        or node.users
        or node._erased  # By way of another that was computed from it.
        or node.op == "placeholder"
        or written_into(node) is not None
    ):
        return
    sources = node.all_input_nodes
    node.graph.erase_node(node)
    for source in sources:
        erase_unused(source)
