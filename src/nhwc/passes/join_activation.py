"""Make an activation of what a model spells with products, so that the layer before it applies it.

x * torch.sigmoid(x)                           ->    SiLU, as many EfficientNets have it
x * F.relu6(x + 3) / 6                         ->    Hardswish
F.relu6(x + 3) / 6                             ->    Hardsigmoid

GELU stays as it is spelled: torch's own makes NaN of infinity.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx, nn

from ..graph import add_module, bound
from ..graph.nodes.unused import erase_unused
from ..graph.report import PassReport, Site
from ._folding_sites import name_of, written_between
from ._matching import activation_of, arithmetic, is_own
from ._reporting import reported

_CLAMPS = (torch.clamp, torch.clip, "clamp", "clip")


def join_activation(gm: fx.GraphModule) -> PassReport:
    """Replace each product that an activation of torch's computes by that one."""
    sites = []
    for node in list(gm.graph.nodes):
        found = _spelled(node)
        if found is None:
            continue
        x, activation = found
        kind = type(activation).__name__
        reason = written_between([x], min(x.users), node)
        sites.append(Site(name_of(node), kind, not reason, reason))
        if reason:
            continue
        with gm.graph.inserting_before(node):
            made = add_module(gm.graph, f"{node.name}_{kind.lower()}", activation.eval(), (x,))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        erase_unused(node)
    return reported(gm, "join_activation", sites)


def _spelled(node: fx.Node) -> tuple[fx.Node, nn.Module] | None:
    """What `node` applies which activation to."""
    if arithmetic(node) not in ("mul", "div"):
        return None
    number, values = _factors(node, top=True)
    if len(values) == 1:
        x = _above_three(values[0])
        return (x, nn.Hardsigmoid()) if x is not None and _is(number, 1 / 6) else None
    if len(values) != 2:
        return None
    for x, gate in (values, values[::-1]):
        if _is(number, 1.0) and gate.args[:1] == (x,):
            kind = _KINDS.get(type(activation_of(gate)))
            if kind is not None:
                return x, kind()
        if _is(number, 1 / 6) and _above_three(gate) is x:
            return x, nn.Hardswish()
    return None


_KINDS: dict[type, type[nn.Module]] = {nn.Sigmoid: nn.SiLU, nn.Hardsigmoid: nn.Hardswish}
"""By the gate that a value is multiplied with, which is one of its own."""


def _factors(node: Any, *, top: bool = False) -> tuple[float, tuple[fx.Node, ...]]:
    """The numbers, as one, and the values whose product `node` is."""
    kind = arithmetic(node) if top or is_own(node) else None
    if kind not in ("mul", "div") or len(node.args) != 2 or node.kwargs:
        return 1.0, (node,)
    first, second = node.args
    if type(second) in (int, float) and second:
        number, values = _factors(first)
        return (number * second if kind == "mul" else number / second), values
    if kind == "div":
        return 1.0, (node,)
    if type(first) in (int, float):
        number, values = _factors(second)
        return number * first, values
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return 1.0, (node,)
    one, other = _factors(first), _factors(second)
    return one[0] * other[0], (*one[1], *other[1])


def _is(number: float, wanted: float) -> bool:
    """Whether a number is one that is written with some digits."""
    return math.isclose(number, wanted, rel_tol=1e-6)


def _above_three(node: fx.Node) -> fx.Node | None:
    """The value that `node` is, three more, within 0 and 6."""
    if node.target in _CLAMPS:
        given = bound(node, ("input", "min", "max"))
        within = (given.get("min"), given.get("max")) == (0, 6)
    else:
        bounds: Any = activation_of(node)
        within = isinstance(bounds, nn.Hardtanh) and (bounds.min_val, bounds.max_val) == (0, 6)
    return _before_three(node.args[0]) if within and node.args else None


def _before_three(node: Any) -> fx.Node | None:
    """What 3 was added to."""
    if not isinstance(node, fx.Node) or arithmetic(node) != "add" or node.kwargs:
        return None
    values = [one for one in node.args if isinstance(one, fx.Node)]
    numbers = [one for one in node.args if type(one) in (int, float)]
    return values[0] if len(values) == 1 and numbers == [3] else None
