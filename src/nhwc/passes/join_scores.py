"""Join attention that a model spells as products and a softmax into one layer.

scores = q @ k.transpose(-2, -1) * scale          y = SpelledAttention(scale)(q, k.transpose(..),
y = (scores + bias).softmax(-1) @ v          ->                                v, bias)

What is computed is what was spelled, up to where the scale is multiplied. As one layer it needs no
matrix of scores in memory. Windows that were shifted add masks of their own, to scores that are
seen as images of windows for as long: `scores.view(B, W, H, N, N) + masks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from ..graph import add_module, erase, erase_unused
from ..graph.modules.mended import SpelledAttention
from ..graph.report import PassReport, Site
from ._folding_sites import name_of, written_between
from ._matching import (
    arithmetic,
    is_own,
    is_product,
    is_softmax,
    only_user,
    shape_given,
    unscaled,
)
from ._reporting import reported


@dataclass(frozen=True)
class _Scores:
    """The product of queries and keys, the queries before they were multiplied by a number, all
    numbers that the product is multiplied by, and what is added.

    `masks` are of windows, and added to scores of this `shape`.
    """

    product: fx.Node
    queries: fx.Node
    scale: float
    bias: Any
    masks: Any
    shape: list[int] | None

    @property
    def read(self) -> tuple[Any, ...]:
        return (self.queries, self.product.args[1], self.bias, self.masks)

    @property
    def added(self) -> tuple[Any, ...]:
        """The arguments that say what is added."""
        if self.masks is not None:
            return (self.bias, self.masks, self.shape)
        return () if self.bias is None else (self.bias,)


def join_scores(gm: fx.GraphModule) -> PassReport:
    """Join all attention between whose products nothing but a scale, a bias and a softmax is."""
    sites = []
    for node in list(gm.graph.nodes):
        if not is_softmax(node):
            continue
        mixing = _mixing(node)
        if mixing is None:
            continue
        scores = _scores(node)
        reason = "its scores are not a product with a scale and a bias"
        if scores is not None:
            reason = written_between(scores.read, scores.product.all_input_nodes[0], mixing)
        sites.append(Site(name_of(node), "attention", not reason, reason))
        if scores is None or reason:
            continue
        args = (scores.queries, scores.product.args[1], mixing.args[1], *scores.added)
        with gm.graph.inserting_before(mixing):
            joined = add_module(
                gm.graph, f"{node.name}_joined", SpelledAttention(scores.scale), args
            )
        first = mixing.args[0]
        erase(mixing, joined)
        erase_unused(first)
    return reported(gm, "join_scores", sites)


def _mixing(softmax: fx.Node) -> fx.Node | None:
    """The product with the values, if nothing else reads the weights."""
    user = only_user(softmax)
    if user is None or not is_product(user) or user.args[0] is not softmax:
        return None
    return user if user.args[1] is not softmax else None


def _scores(softmax: fx.Node) -> _Scores | None:
    """What the scores are made of: a product, perhaps scaled, and then perhaps a bias and masks."""
    node: Any = softmax.args[0] if softmax.args else None
    node, masks, shape = _without_masks(node)
    bias = None
    if is_own(node) and arithmetic(node) == "add" and len(node.args) == 2 and not node.kwargs:
        node, bias = _sum(node)
        if not isinstance(bias, fx.Node):
            return None
    node, scale = unscaled(node)
    if not (is_own(node) and is_product(node)):
        return None
    queries, before = unscaled(node.args[0])
    return _Scores(node, queries, scale * before, bias, masks, shape)


def _without_masks(node: Any) -> tuple[Any, Any, list[int] | None]:
    """The scores before masks of windows were added, these, and the shape they were added in."""
    together, plain = _own_shape(node), (node, None, None)
    if together is None or arithmetic(node.args[0]) != "add" or not is_own(node.args[0]):
        return plain
    first, second = (*node.args[0].args, None, None)[:2]
    apart = _own_shape(first)
    if apart is None or len(apart) != 5 or not isinstance(second, fx.Node):
        return plain
    # As many numbers in matrices of the same sizes are as many windows.
    if together[1:] != apart[2:]:
        return plain
    return first.args[0], second, apart


def _own_shape(node: Any) -> list[int] | None:
    """The numbers that `view` or `reshape` is given, of a value that one other reads."""
    numbers = shape_given(node) if is_own(node) else None
    plain = numbers is not None and all(type(one) is int for one in numbers)
    return numbers if plain else None


def _sum(node: fx.Node) -> tuple[Any, Any]:
    """The scores, and what is added to them."""
    first, second = node.args
    swapped = isinstance(second, fx.Node) and _leads_to_product(second)
    return (second, first) if swapped and not _leads_to_product(first) else (first, second)


def _leads_to_product(node: Any) -> bool:
    while isinstance(node, fx.Node) and arithmetic(node) in ("mul", "div"):
        node = next((one for one in node.args if isinstance(one, fx.Node)), None)
    return isinstance(node, fx.Node) and is_product(node)
