"""Recognize nodes computed from sizes, types and devices alone, not from values or strides."""

from __future__ import annotations

import operator

from torch import fx

from ...operators.kinds import SHAPE_ATTRIBUTES, SHAPE_METHODS


def is_size(value: object) -> bool:
    """Whether this node or traced value is computed from sizes, types and devices alone."""
    node = node_of(value)
    if node is None:
        return False
    if node.op == "call_method":
        return node.target in SHAPE_METHODS
    if node.target is getattr:
        return node.args[1] in SHAPE_ATTRIBUTES
    if getattr(node.target, "__module__", "") == operator.add.__module__:
        values = [value for value in node.args if isinstance(value, fx.Node)]
        return bool(values) and all(map(is_size, values))
    return False


def node_of(value: object) -> fx.Node | None:
    """Return the node of a traced value, or `value` if it is a node itself; else None."""
    if isinstance(value, fx.Proxy):
        return value.node
    return value if isinstance(value, fx.Node) else None
