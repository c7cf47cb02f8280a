"""Sums over stacked images and over one side of an image, which torch returns in NCHW.

Networks with branches (SKNet, ResNeSt) stack them, weigh them, and add them up again. Attention to
places (CBAM) joins the mean and the maximum of all channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..graph import add_module, bound, erase
from ..graph.modules.ordered import Reduced
from ..graph.nodes.ranks import ranks_of
from ..graph.report import PassReport, Site
from ..operators.kinds import torchs_name
from ._folding_sites import name_of
from ._reporting import reported

_KINDS = ("sum", "mean", "amax", "amin")


def mend_reduction(gm: fx.GraphModule) -> PassReport:
    """Replace reductions that leave an image of several channels and several pixels."""
    sites = []
    ranks = ranks_of(gm.graph)
    for node in list(gm.graph.nodes):
        kind = torchs_name(node.target)
        if node.op not in ("call_function", "call_method") or kind not in _KINDS:
            continue
        given = bound(node, ("input", "dim", "keepdim"))
        value, keepdim = given.get("input"), given.get("keepdim", False)
        dims = _dims(given.get("dim"))
        plain = given.keys() <= {"input", "dim", "keepdim"} and type(keepdim) is bool and dims
        rank = ranks.get(value) if isinstance(value, fx.Node) else None
        kept = bool(rank and _leaves_an_image(rank, dims, keepdim=keepdim))
        if not plain or not (kept or (keepdim and _leaves_a_map(node, dims))):
            continue
        sites.append(Site(name_of(node), kind, True))
        with gm.graph.inserting_before(node):
            call = add_module(gm.graph, kind, Reduced(kind, dims, keepdim), (value,))
        erase(node, call)
    return reported(gm, "mend_reduction", sites)


def _dims(given: Any) -> tuple[int, ...]:
    dims = given if isinstance(given, list | tuple) else (given,)
    return tuple(dims) if all(type(dim) is int for dim in dims) else ()


def _leaves_an_image(rank: int, dims: tuple[int, ...], *, keepdim: bool) -> bool:
    gone = {dim % rank for dim in dims}
    left = rank if keepdim else rank - len(gone)
    channels, *pixels = range(rank - 3, rank)
    return left >= 4 and channels not in gone and not gone.issuperset(pixels)


def _leaves_a_map(node: fx.Node, dims: tuple[int, ...]) -> bool:
    """Whether one channel is left, and joined with others: by its strides those go on in NHWC."""
    joined = all(user.target in (torch.cat, torch.concat) for user in node.users)
    return dims in ((1,), (-3,)) and joined
