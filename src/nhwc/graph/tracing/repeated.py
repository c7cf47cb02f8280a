"""Trace a module; twice if its code asks the system for what may be another number at each call.

    return self.conv(x) * (1 + random.SystemRandom().random())

A graph would repeat the number of the trace. Code that only tells how long it took has the same
graph twice, and keeps it.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..effects.state import State
from ..nodes.edit import attribute, filled
from ..nodes.names import is_constant
from .tracer import Tracer

_ASKS = "two runs of its code differ: it asks the system for the time, say, or for random numbers"


def trace_whole(
    state: State,
    across: dict[nn.Module, str],
    opaque: dict[str, str],
    concrete: dict[str, Any],
    *,
    believed: bool,
) -> fx.Graph:
    """Trace the module of `state`; add to `opaque` the parts that stay calls, with the reasons."""
    while True:
        graph, asks = _trace_once(state, across, opaque, concrete, believed)
        if not asks:
            return graph
        again, _ = _trace_once(state, across, {**opaque}, concrete, believed)
        around = _unlike(graph, again, state.module)
        if around is None:
            return graph
        if not around:
            raise fx.proxy.TraceError(_ASKS)
        opaque[around] = _ASKS


def _trace_once(
    state: State,
    across: dict[nn.Module, str],
    opaque: dict[str, str],
    concrete: dict[str, Any],
    believed: bool,
) -> tuple[fx.Graph, bool]:
    tracer = Tracer(state, across, believed=believed)
    tracer.opaque = opaque
    try:
        graph = tracer.trace(state.module, concrete)
        tracer.check()
        return graph, tracer.asks_the_system
    finally:
        # fx's wrappers and the tracer refer to one another; uncleared, the cycle would keep weights
        # alive that passes replace.
        vars(tracer).clear()


def _unlike(one: fx.Graph, other: fx.Graph, root: nn.Module) -> str | None:
    """The innermost part around the first node that differs, '' for `root`; None if none does."""
    same: dict[fx.Node, fx.Node] = {}
    for node, again in zip_longest(one.nodes, other.nodes):
        if node is None or again is None:
            return ""
        given = filled((again.args, again.kwargs), same.__getitem__)
        # Of floats a text tells zeros apart by their signs, and finds that NaN is NaN.
        alike = node.op == again.op and repr(given) == repr((node.args, node.kwargs))
        if not alike or not _alike(node, again, root):
            shared = [a for a, b in zip(_around(node), _around(again), strict=False) if a == b]
            return shared[-1] if shared else ""
        same[again] = node
    return None


def _alike(node: fx.Node, again: fx.Node, root: nn.Module) -> bool:
    if node.target == again.target:
        return True
    if not (is_constant(node) and is_constant(again)):
        return False
    one, other = (attribute(root, str(which.target)) for which in (node, again))
    if not isinstance(one, Tensor) or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(tensor.flatten().view(torch.uint8) for tensor in (one, other)))


def _around(node: fx.Node) -> list[str]:
    """The paths of the parts whose code made this node, the outermost first."""
    paths = [path for path, _ in node.meta.get("nn_module_stack", {}).values()]
    return [path for path in paths if node.op != "call_module" or path != node.target]
