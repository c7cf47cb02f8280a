"""Reshapes between volumes and batches of their frames, as one layer each, which moves no data.

A permutation alone leaves a volume whose "channels" are frames: a plan would copy it to have those
densest. With the reshape that belongs to it, it is the same memory.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..graph import add_module, bound, erase
from ..graph.modules.frames import FromFrames, ToFrames
from ..graph.nodes.ranks import ranks_of
from ..graph.report import PassReport, Site
from ._folding_sites import input_of, name_of, written_between
from ._matching import permutation, shape_given
from ._reporting import reported

_SWAP = (0, 2, 1, 3, 4)


def mend_frames(gm: fx.GraphModule) -> PassReport:
    """Join each swap of channels and frames with the reshape before or behind it."""
    sites = []
    ranks = ranks_of(gm.graph)
    for node in list(gm.graph.nodes):
        found = _to_frames(node, ranks) or _from_frames(node)
        if found is None:
            continue
        module, *arguments = found
        sites.append(Site(name_of(node), type(module).__name__, True))
        with gm.graph.inserting_before(node):
            call = add_module(gm.graph, "frames", module, tuple(arguments))
        erase(node, call)
    return reported(gm, "mend_frames", sites)


def _to_frames(node: fx.Node, ranks: dict[fx.Node, int | None]) -> tuple[Any, ...] | None:
    volume = _swapped(input_of(node), ranks)
    if volume is None:
        return None
    if node.target in ("flatten", torch.flatten):
        given = bound(node, ("input", "start_dim", "end_dim"))
        ends = given.get("start_dim", 0), given.get("end_dim", -1)
        return (ToFrames(), volume) if ends == (0, 1) else None
    shape = shape_given(node)
    return (ToFrames(), volume, shape) if shape and len(shape) == 4 else None


def _from_frames(node: fx.Node) -> tuple[Any, ...] | None:
    # A reshape to five numbers says that `transpose` swaps two of five.
    source = input_of(node)
    if source is None or len(shape := shape_given(source) or []) != 5:
        return None
    if permutation(node) != _SWAP and not _swaps_by_number(node):
        return None
    # A reshape may copy.
    if written_between(source.args[:1], source, node):
        return None
    return FromFrames(), source.args[0], shape


def _swapped(node: Any, ranks: dict[fx.Node, int | None]) -> Any:
    """The volume whose channels and frames `node` swaps."""
    if not isinstance(node, fx.Node):
        return None
    volume = input_of(node)
    known = volume is not None and _swaps_by_number(node) and ranks.get(volume) == 5
    return volume if permutation(node) == _SWAP or known else None


def _swaps_by_number(node: fx.Node) -> bool:
    if node.target not in ("transpose", torch.transpose):
        return False
    given = bound(node, ("input", "dim0", "dim1"))
    dims: Any = given.get("dim0"), given.get("dim1")
    return all(type(dim) is int for dim in dims) and {dim % 5 for dim in dims} == {1, 2}
