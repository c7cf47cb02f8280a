"""Join a group or instance norm, a residual add and an activation into one call.

The norm writes each pixel last of all it does: what is added there, and applied to it, is no pass
over the image of its own.
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from ..graph import erase, module_of, replace_module
from ..graph.modules.layers import Fused
from ..graph.modules.mended import GroupNorm, InstanceNorm
from ..graph.report import PassReport, Site
from ..operators.kinds import writes_first
from ._folding_sites import name_of, written_between
from ._matching import activation_of, is_addition, only_user
from ._reporting import reported


def fuse_norm_activation(gm: fx.GraphModule) -> PassReport:
    """Turn each mended norm, and the add and the activation after it, into a `Fused` layer."""
    sites = []
    for node in list(gm.graph.nodes):
        norm = module_of(node)
        if isinstance(norm, GroupNorm | InstanceNorm) and len(node.args) == 1 and not node.kwargs:
            site = _fuse(node, norm)
            sites += [site] if site else []
    return reported(gm, "fuse_norm_activation", sites)


def _fuse(node: fx.Node, norm: nn.Module) -> Site | None:
    add, reason = only_user(node), ""
    if add is None or not is_addition(add):
        add = None
    if add is not None:
        reason = _unfit(node, add)
    end: Any = add if add is not None and not reason else node
    after: Any = only_user(end)
    activation = activation_of(after) if after is not None else None
    what = [name_of(node), *(["add"] if add else []), *([_kind(activation)] if activation else [])]
    if end is node and activation is None:
        return Site(name_of(node), " + ".join(what), False, reason) if reason else None
    writes = end is not node and writes_first(end.target)
    if end is not node:
        residual = next(value for value in end.args if value is not node)
        # The call stands where the sum was: the other operand may be computed after the norm.
        end.prepend(node)
        node.args = (node.args[0], residual)
        erase(end, node)
    if activation is not None:
        erase(after, node)
    replace_module(node, Fused(norm, activation, in_place=writes).train(norm.training))
    return Site(name_of(node), " + ".join(what), True)


def _kind(activation: nn.Module) -> str:
    return type(activation).__name__


def _unfit(node: fx.Node, add: fx.Node) -> str:
    """Why the norm cannot take the sum over; empty if it can."""
    if add.args[0] is add.args[1]:
        return "it is added to itself"
    if writes_first(add.target) and add.args[0] is not node:
        return "the sum is written into the other operand"
    return written_between(node.all_input_nodes, node, add)
