"""Call what has several names in torch by one of them, so that every other pass knows it."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import fx

from ..graph.report import PassReport, Site
from ._folding_sites import name_of
from ._reporting import reported

_NAMES = {
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "negative": "neg",
    "absolute": "abs",
    "clip": "clamp",
    "concat": "cat",
    "concatenate": "cat",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "moveaxis": "movedim",
    "split_with_sizes": "split",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "not_equal": "ne",
}
_FUNCTIONS: dict[Any, Any] = {getattr(torch, one): getattr(torch, _NAMES[one]) for one in _NAMES}
_FUNCTIONS |= {
    torch.special.expit: torch.sigmoid,
    torch.special.softmax: torch.softmax,
    torch.special.log_softmax: torch.log_softmax,
    torch.special.erf: torch.erf,
}
_METHODS = {
    spelt + ending: name + ending
    for spelt, name in _NAMES.items()
    for ending in ("", "_")
    if hasattr(torch.Tensor, name + ending)
}
_KEYWORDS = {"axis": "dim", "axis0": "dim0", "axis1": "dim1", "keepdims": "keepdim"}
"""NumPy's words for arguments, which torch takes, too."""


def plain_names(gm: fx.GraphModule) -> PassReport:
    """Give calls of torch's operators their first name, and their arguments torch's own."""
    sites = []
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        known = _FUNCTIONS if node.op == "call_function" else _METHODS
        target, kwargs = known.get(node.target, node.target), dict(node.kwargs)
        if target in (torch.split, "split") and not kwargs.keys() <= {"dim"}:
            continue  # It has other words for the rest.
        if _is_torchs(node):
            kwargs = {_KEYWORDS.get(key, key): value for key, value in kwargs.items()}
        if target is node.target and kwargs == dict(node.kwargs):
            continue
        sites.append(Site(name_of(node), str(getattr(target, "__name__", target)), True))
        node.target, node.kwargs = target, kwargs
    return reported(gm, "plain_names", sites)


def _is_torchs(node: fx.Node) -> bool:
    """Whether it is a method of a tensor, or a function of torch that was written in C."""
    if node.op == "call_method":
        return hasattr(torch.Tensor, str(node.target))
    return isinstance(node.target, types.BuiltinFunctionType)
