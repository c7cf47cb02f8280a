"""Join a convolution, a residual add and an activation into one call, served by one kernel."""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from torch.nn.modules.conv import _ConvNd

from ..graph import clean, erase, module_of, replace_module
from ..graph.modules.layers import Fused
from ..graph.nodes.ranks import asks_rank
from ..graph.report import PassReport, Site
from ..operators.kinds import writes_first
from ._folding_sites import layer_unfit, name_of, written_between
from ._matching import activation_of, is_addition, only_user


def fuse_epilogue(gm: fx.GraphModule) -> PassReport:
    """Turn each convolution or linear layer and the add and activation after it into a `Fused`."""
    sites = []
    changed = False
    for node in list(gm.graph.nodes):
        layer = module_of(node)
        if not isinstance(layer, _ConvNd | nn.Linear) or isinstance(layer, Fused):
            continue
        changed |= _ask_before(node, layer)
        follower = only_user(node)
        if follower is None or not (is_addition(follower) or activation_of(follower)):
            continue
        site = _fuse(node, layer, follower)
        if site is not None:
            sites.append(site)
    if changed or any(site.applied for site in sites):
        clean(gm)
    return PassReport("fuse_epilogue", tuple(sites))


def _ask_before(node: fx.Node, layer: nn.Module) -> bool:
    """Move questions for the rank of the result to the input, which has the same rank."""
    if layer_unfit(layer) is not None or len(node.args) != 1 or node.kwargs:
        return False
    (value,) = node.all_input_nodes
    asking = [user for user in node.users if asks_rank(user)]
    for user in asking:
        user.replace_input_with(node, value)
        node.prepend(user)
    return bool(asking)


def _fuse(node: fx.Node, layer: nn.Module, follower: fx.Node) -> Site | None:
    residual, end = None, node
    reason = layer_unfit(layer)
    if len(node.args) != 1 or node.kwargs:
        reason = "it is called with more than its input"
    if is_addition(follower) and reason is None:
        residual, reason = _residual(node, follower)
        if residual is not None:
            end = follower
    after = only_user(end)
    activation = activation_of(after) if after is not None else None
    if after is not None and activation is not None:
        end = after
    if end is node:
        # The layer of the other branch comes later, so it takes the add.
        return Site(name_of(node), "", False, reason) if reason else None
    what = [name_of(node), *(["add"] if residual is not None else [])]
    what += [type(activation).__name__] if activation is not None else []
    if reason is not None:
        return Site(name_of(node), " + ".join(what), False, reason)
    # Images lie as the convolution says, which the passes before have seen to.
    first = residual is not None and isinstance(layer, nn.Linear) and follower.args[0] is residual
    writes = residual is not None and writes_first(follower.target)
    _replace(node, end, residual, Fused(layer, activation, first, writes).train(layer.training))
    return Site(name_of(node), " + ".join(what), True)


def _replace(node: fx.Node, end: fx.Node, residual: fx.Node | None, fused: Fused) -> None:
    value = node.args[0]
    graph = node.graph
    middle: Any = only_user(node)
    # The call stands here and not in the activation's place: an operand may be overwritten by then.
    with graph.inserting_before(node if residual is None else middle):
        call = graph.call_module(
            str(node.target), (value,) if residual is None else (value, residual)
        )
    call.meta = dict(node.meta)
    erase(end, call)
    if middle is not end:
        graph.erase_node(middle)
    graph.erase_node(node)
    replace_module(call, fused)


def _residual(node: fx.Node, add: fx.Node) -> tuple[fx.Node | None, str | None]:
    """Return the value that `add` adds to the output of `node`, or why it cannot be fused."""
    first, second = add.args
    other: Any = second if first is node else first
    if other is node:
        return None, "it is added to itself"
    taker = _taker(add)
    if taker is not node:
        return None, None if taker else "the sum is written into the other operand"
    reason = written_between(node.all_input_nodes, node, add)
    return (None, reason) if reason else (other, None)


def _taker(add: fx.Node) -> fx.Node | None:
    """Return the layer that takes the add: the one that it writes into, or else the later one."""
    operands: Any = add.args[:1] if writes_first(add.target) else add.args
    able = [n for n in operands if only_user(n) is add and _may_take(module_of(n))]
    return max(able, default=None)


def _may_take(layer: nn.Module | None) -> bool:
    if not isinstance(layer, _ConvNd | nn.Linear) or isinstance(layer, Fused):
        return False
    return layer_unfit(layer) is None
