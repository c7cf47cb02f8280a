"""Call what has several names in torch by one of them, so that every other pass knows it."""

from __future__ import annotations

import re
import types
from typing import Any

import torch
from torch import fx

from ..graph.report import PassReport, Site
from ..operators.kinds import argument_names
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
_KEYWORDS |= {"x": "input", "a": "input", "x1": "input", "x2": "other"}
"""NumPy's words for arguments, which torch takes, too, where it has no such argument itself."""


def plain_names(gm: fx.GraphModule) -> PassReport:
    """Give calls of torch's operators their first name, and their arguments torch's own."""
    sites = []
    for node in gm.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        order = _order_of(node)
        if order is not None:
            sites.append(Site(name_of(node), "permute", True))
            node.target, node.args = torch.permute, (node.all_input_nodes[0], order)
            continue
        known = _FUNCTIONS if node.op == "call_function" else _METHODS
        target, kwargs = known.get(node.target, node.target), dict(node.kwargs)
        if target in (torch.split, "split") and not kwargs.keys() <= {"dim"}:
            continue  # It has other words for the rest.
        if _is_torchs(node):
            own = argument_names(target)
            words = {key: key if key in own else _KEYWORDS.get(key, key) for key in kwargs}
            kwargs = {words[key]: value for key, value in kwargs.items()}
        if target is node.target and kwargs == dict(node.kwargs):
            continue
        sites.append(Site(name_of(node), str(getattr(target, "__name__", target)), True))
        node.target, node.kwargs = target, kwargs
    return reported(gm, "plain_names", sites)


def _order_of(node: fx.Node) -> tuple[int, ...] | None:
    """In which order an `einsum` of one tensor puts its dimensions; None if it does more."""
    if node.target is not torch.einsum or len(node.all_input_nodes) != 1 or node.kwargs:
        return None
    text = node.args[0]
    match = re.fullmatch(r"([a-zA-Z]+)->([a-zA-Z]+)", re.sub(r"\s", "", str(text)))
    if match is None or not sorted({*match[1]}) == sorted(match[1]) == sorted(match[2]):
        return None
    return tuple(map(match[1].index, match[2]))


def _is_torchs(node: fx.Node) -> bool:
    """Whether it is a method of a tensor, or a function of torch that was written in C."""
    if node.op == "call_method":
        return hasattr(torch.Tensor, str(node.target))
    return isinstance(node.target, types.BuiltinFunctionType)
