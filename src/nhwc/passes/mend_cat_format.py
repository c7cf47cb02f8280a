"""Keep the format through a `cat` of channels that starts with a slice or mixes formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..graph import add_module, bound, module_of
from ..graph.modules.mended import Cat, Pixel
from ..graph.report import PassReport, Site
from ._folding_sites import name_of
from ._matching import is_reshaped, whole_of_slice
from ._reporting import reported


def mend_cat_format(gm: fx.GraphModule) -> PassReport:
    """Replace every channel `cat` that starts with a slice, or whose inputs may have two formats.

    Reshaped values may, and so may an input of the graph beside another value.
    """
    sites = []
    for node in list(gm.graph.nodes):
        if node.target not in (torch.cat, torch.concat):
            continue
        arguments = bound(node, ("tensors", "dim"))
        tensors = arguments.get("tensors")
        if not isinstance(tensors, list | tuple) or not tensors or not _may_differ(tensors):
            continue
        reason = "" if arguments.get("dim") in (1, -3) else "it does not join channels"
        if "out" in node.kwargs:
            reason = "it writes into a given tensor"
        sites.append(Site(name_of(node), "cat", not reason, reason))
        if reason:
            continue
        with gm.graph.inserting_before(node):
            call = add_module(gm.graph, "cat", Cat(arguments["dim"]), (list(tensors),))
        node.replace_all_uses_with(call)
        gm.graph.erase_node(node)
    return reported(gm, "mend_cat_format", sites)


def _may_differ(tensors: Sequence[Any]) -> bool:
    """Whether the inputs may lie in memory differently, or the first one is a slice of channels."""
    if isinstance(tensors[0], fx.Node) and whole_of_slice(tensors[0]) is not None:
        return True
    nodes = [node for node in tensors if isinstance(node, fx.Node)]
    roots = {_root(node) for node in nodes}
    unknown = any(root.op == "placeholder" for root in roots) and len(roots) > 1
    return unknown or any(is_reshaped(n) or isinstance(module_of(n), Pixel) for n in nodes)


def _root(node: fx.Node) -> fx.Node:
    whole = whole_of_slice(node)
    return node if whole is None else _root(whole)
