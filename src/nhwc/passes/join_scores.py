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

import torch
import torch.nn.functional as F
from torch import fx, nn

from ..graph import add_module, bound, clean, erase, module_of
from ..graph.leaves import opaque_by_nature
from ..graph.mended import SpelledAttention
from ..graph.report import PassReport, Site
from ._folding_sites import name_of
from ._matching import arithmetic, numbers_given, only_user

_PRODUCTS = (torch.matmul, "matmul", torch.bmm, "bmm", "__matmul__")
_SOFTMAXES = (torch.softmax, F.softmax, "softmax")


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
    def added(self) -> tuple[Any, ...]:
        """The arguments that say what is added."""
        if self.masks is not None:
            return (self.bias, self.masks, self.shape)
        return () if self.bias is None else (self.bias,)


def join_scores(gm: fx.GraphModule) -> PassReport:
    """Join all attention between whose products nothing but a scale, a bias and a softmax is."""
    sites = []
    for node in list(gm.graph.nodes):
        if not _is_softmax(node):
            continue
        mixing = _mixing(node)
        if mixing is None:
            continue
        scores = _scores(node)
        reason = "" if scores else "its scores are not a product with a scale and a bias"
        sites.append(Site(name_of(node), "attention", not reason, reason))
        if scores is None:
            continue
        args = (scores.queries, scores.product.args[1], mixing.args[1], *scores.added)
        with gm.graph.inserting_before(mixing):
            joined = add_module(
                gm.graph, f"{node.name}_joined", SpelledAttention(scores.scale), args
            )
        first = mixing.args[0]
        erase(mixing, joined)
        _erase_unused(first, until={*joined.all_input_nodes})
    if any(site.applied for site in sites):
        clean(gm)
    return PassReport("join_scores", tuple(sites))


def _is_softmax(node: fx.Node) -> bool:
    """Whether `node` is a softmax over the last dimension."""
    module = module_of(node)
    if module is not None:
        return type(module) is nn.Softmax and module.dim == -1 and not opaque_by_nature(module)
    if node.target not in _SOFTMAXES:
        return False
    given = bound(node, ("input", "dim"))
    # torch's own function hands on all its arguments.
    known = given.keys() <= {"input", "dim", "_stacklevel", "dtype"} and given.get("dtype") is None
    return given.get("dim") == -1 and known


def _mixing(softmax: fx.Node) -> fx.Node | None:
    """The product with the values, if nothing else reads the weights."""
    user = only_user(softmax)
    if user is None or not _is_product(user) or user.args[0] is not softmax:
        return None
    return user if user.args[1] is not softmax else None


def _scores(softmax: fx.Node) -> _Scores | None:
    """What the scores are made of: a product, perhaps scaled, and then perhaps a bias and masks."""
    node: Any = softmax.args[0] if softmax.args else None
    node, masks, shape = _without_masks(node)
    bias = None
    if _is_own(node) and arithmetic(node) == "add" and len(node.args) == 2 and not node.kwargs:
        node, bias = _sum(node)
        if not isinstance(bias, fx.Node):
            return None
    node, scale = _unscaled(node)
    if not (_is_own(node) and _is_product(node)):
        return None
    queries, before = _unscaled(node.args[0])
    return _Scores(node, queries, scale * before, bias, masks, shape)


def _without_masks(node: Any) -> tuple[Any, Any, list[int] | None]:
    """The scores before masks of windows were added, these, and the shape they were added in."""
    together, plain = _shape_given(node), (node, None, None)
    if together is None or arithmetic(node.args[0]) != "add" or not _is_own(node.args[0]):
        return plain
    first, second = (*node.args[0].args, None, None)[:2]
    apart = _shape_given(first)
    if apart is None or len(apart) != 5 or not isinstance(second, fx.Node):
        return plain
    images, windows, *rest = apart
    counted = images > 0 and together[0] == images * windows
    if together[1:] != rest or not (counted or together[0] == -1):
        return plain
    return first.args[0], second, apart


def _shape_given(node: Any) -> list[int] | None:
    """The numbers that `view` or `reshape` is given, of a value that one other reads."""
    if not _is_own(node) or node.target not in ("view", "reshape"):
        return None
    numbers = numbers_given(node)
    plain = isinstance(numbers, (list, tuple)) and all(type(one) is int for one in numbers)
    return [*numbers] if plain else None


def _unscaled(node: Any) -> tuple[Any, float]:
    """A value before it was multiplied by a number, and this number."""
    kind = arithmetic(node) if _is_own(node) else None
    if kind not in ("mul", "div") or len(node.args) != 2 or node.kwargs:
        return node, 1.0
    value, number = node.args
    if kind == "mul" and type(value) in (int, float):
        value, number = number, value
    if type(number) not in (int, float) or not number or not isinstance(value, fx.Node):
        return node, 1.0
    return value, float(number) if kind == "mul" else 1.0 / number


def _sum(node: fx.Node) -> tuple[Any, Any]:
    """The scores, and what is added to them."""
    first, second = node.args
    swapped = isinstance(second, fx.Node) and _leads_to_product(second)
    return (second, first) if swapped and not _leads_to_product(first) else (first, second)


def _leads_to_product(node: Any) -> bool:
    while isinstance(node, fx.Node) and arithmetic(node) in ("mul", "div"):
        node = next((one for one in node.args if isinstance(one, fx.Node)), None)
    return isinstance(node, fx.Node) and _is_product(node)


def _is_own(node: Any) -> bool:
    """Whether `node` is a value that one other reads."""
    return isinstance(node, fx.Node) and only_user(node) is not None


def _is_product(node: fx.Node) -> bool:
    """Whether `node` is a product of two tensors."""
    known = node.target in _PRODUCTS or getattr(node.target, "__name__", "") == "matmul"
    both = len(node.args) == 2 and all(isinstance(one, fx.Node) for one in node.args)
    return node.op in ("call_function", "call_method") and known and both and not node.kwargs


def _erase_unused(node: Any, until: set[Any]) -> None:
    """Erase a node and all that it alone was computed from."""
    if not isinstance(node, fx.Node) or node in until or node.users:
        return
    if node.op == "placeholder":
        return
    sources = node.all_input_nodes
    node.graph.erase_node(node)
    for source in sources:
        _erase_unused(source, until)
