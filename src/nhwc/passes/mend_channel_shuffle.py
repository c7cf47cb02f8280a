"""Keep NHWC through the channel shuffle that models write by hand: view, transpose, view.

Torch's copy between the two views makes NCHW of a channels-last tensor. The replacement copies
once, in NHWC, and does the work of a `cat` just before it in the same copy.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..graph import add_module, bound, clean
from ..graph.modules.mended import ChannelShuffle, Interleave
from ..graph.report import PassReport, Site
from ._folding_sites import name_of
from ._matching import only_user, size_read
from ._reporting import reported


def mend_channel_shuffle(gm: fx.GraphModule) -> PassReport:
    """Replace every hand-written channel shuffle, and the `cat` before it if there is one."""
    sites, shuffles = [], []
    for node in list(gm.graph.nodes):
        chain = _chain(node)
        if chain is None:
            continue
        value, groups = node.args[0], _dims(node)[1]
        if not isinstance(groups, int) or groups < 1:
            sites.append(Site(name_of(node), "channel shuffle", False, "its groups vary"))
            continue
        with gm.graph.inserting_before(chain[2]):  # the copy of the data
            call = add_module(gm.graph, "channel_shuffle", ChannelShuffle(groups), (value,))
        chain[-1].replace_all_uses_with(call)
        for old in reversed(chain):
            gm.graph.erase_node(old)
        shuffles.append((call, groups))
        sites.append(Site(name_of(call), "channel shuffle", True))
    clean(gm)  # This removes nodes that read the sizes of a cat, and leaves the cat one user.
    for call, groups in shuffles:
        joined = _absorb_cat(gm, call, groups)
        if joined is not None:
            sites.append(joined)
    return reported(gm, "mend_channel_shuffle", sites)


def _absorb_cat(gm: fx.GraphModule, call: fx.Node, groups: int) -> Site | None:
    cat: Any = call.args[0]
    if cat.target is not torch.cat or only_user(cat) is not call:
        return None
    arguments = bound(cat, ("tensors", "dim"))
    tensors = arguments.get("tensors")
    if arguments.get("dim") != 1 or not isinstance(tensors, list | tuple) or groups != len(tensors):
        return None
    with gm.graph.inserting_before(cat):
        both = add_module(gm.graph, "interleave", Interleave(), (list(tensors),))
    call.replace_all_uses_with(both)
    gm.graph.erase_node(call)
    gm.graph.erase_node(cat)
    return Site(name_of(both), "cat + channel shuffle", True)


def _chain(first: fx.Node) -> list[fx.Node] | None:
    """Return the nodes of the shuffle that starts with the view `first`."""
    if not _is_view(first) or not isinstance(first.args[0], fx.Node):
        return None
    value, dims = first.args[0], _dims(first)
    if len(dims) != 5 or not _same_sizes(value, (dims[0], dims[3], dims[4])):
        return None
    turned = only_user(first)
    if turned is None or not _swaps(turned):
        return None
    nodes, last = [first, turned], only_user(turned)
    if last is not None and last.target in ("contiguous", "clone") and len(last.args) == 1:
        if last.kwargs:
            return None
        nodes.append(last)
        last = only_user(last)
    if last is None or not _is_view(last) or len(_dims(last)) != 4:
        return None
    n, c, h, w = _dims(last)
    if n == -1:
        n = dims[0] if size_read(c) == (value, 1) else n
    return [*nodes, last] if _same_sizes(value, (n, h, w)) else None


def _is_view(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target in ("view", "reshape")


def _dims(node: fx.Node) -> tuple[Any, ...]:
    dims = node.args[1:]
    return tuple(dims[0]) if len(dims) == 1 and isinstance(dims[0], list | tuple) else dims


def _same_sizes(value: fx.Node, sizes: tuple[Any, Any, Any]) -> bool:
    wanted = [(value, 0), (value, 2), (value, 3)]
    return [size_read(size) for size in sizes] == wanted


def _swaps(node: fx.Node) -> bool:
    if node.target in (torch.transpose, "transpose"):
        return sorted(node.args[1:]) == [1, 2]  # type: ignore[type-var]
    return node.target == "permute" and tuple(_dims(node)) == (0, 2, 1, 3, 4)
