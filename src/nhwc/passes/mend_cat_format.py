"""Keep the format through a `cat` of channels, which loses it if its first input is a slice."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from ..graph import add_module, clean
from ..graph.mended import Cat
from ..graph.report import PassReport, Site
from ._folding_sites import name_of
from ._matching import named_arguments

_SPLITS = {torch.chunk, torch.split, torch.tensor_split, "chunk", "split", "tensor_split"}
_NARROWS = {torch.narrow, "narrow"}


def mend_cat_format(gm: fx.GraphModule) -> PassReport:
    """Replace every `cat` of channels whose first input is a slice of channels."""
    sites = []
    for node in list(gm.graph.nodes):
        if node.target not in (torch.cat, torch.concat):
            continue
        arguments = named_arguments(node, ("tensors", "dim"))
        tensors = arguments.get("tensors")
        if not isinstance(tensors, list | tuple) or not tensors or not _slices(tensors[0]):
            continue
        reason = "" if arguments.get("dim") in (1, -3) else "it does not join channels"
        if "out" in node.kwargs:
            reason = "it writes into a given tensor"
        sites.append(Site(name_of(node), "cat", not reason, reason))
        if reason:
            continue
        with gm.graph.inserting_before(node):
            call = add_module(gm.graph, "cat", Cat(), (list(tensors),))
        node.replace_all_uses_with(call)
        gm.graph.erase_node(node)
    if any(site.applied for site in sites):
        clean(gm)
    return PassReport("mend_cat_format", tuple(sites))


def _slices(node: Any) -> bool:
    """Whether `node` is a view of some of another tensor's channels."""
    if not isinstance(node, fx.Node):
        return False
    if node.target in _NARROWS:
        return named_arguments(node, ("input", "dim")).get("dim") in (1, -3)
    if node.target is not operator.getitem:
        return False
    source, index = node.args
    if isinstance(source, fx.Node) and source.target in _SPLITS:
        return named_arguments(source, ("input", "sizes", "dim")).get("dim", 0) in (1, -3)
    return isinstance(index, tuple) and len(index) > 1 and isinstance(index[1], slice)
