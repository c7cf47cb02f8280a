"""Turn a product by a constant matrix into a linear layer, however it is spelled.

x @ self.weight                                   y = Linear(weight.t())(x)
torch.addmm(self.bias, x, self.weight)      ->    y = Linear(weight.t(), bias)(x)

As a layer it has kernels to choose from, and takes the activation and the sum behind it. Its weight
is the matrix turned, in the same memory, and no parameter of the model any more; so `fuse`, whose
result may learn, leaves products as they are.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graph import add_module, attribute, erase
from ..graph.nodes.names import CONSTANT, is_made
from ..graph.nodes.ranks import rank_of
from ..graph.nodes.seen import shape_at
from ..graph.report import PassReport, Site
from ._folding_sites import name_of
from ._reporting import reported
from .lift_functional import layer

_ATEN = torch.ops.aten
_EXPORTED = (_ATEN.mm.default, _ATEN.addmm.default)
"""What torch.export makes of products of matrices, for shapes that its programs assert."""
_PRODUCTS = (torch.matmul, operator.matmul, "matmul", _ATEN.matmul.default)
_OF_MATRICES = (torch.mm, "mm", _ATEN.mm.default)
_ADDING = (torch.addmm, _ATEN.addmm.default)


def lift_products(gm: fx.GraphModule) -> PassReport:
    """Replace each product by a matrix that is a parameter or a buffer."""
    sites = []
    for node in list(gm.graph.nodes):
        factors = _factors(node)
        tensors = _constant(gm, factors) if factors else {}
        if not tensors or not (node.target in _PRODUCTS or _of_matrices(node, factors["input"])):
            continue
        sites.append(Site(name_of(node), "Linear", True))
        with gm.graph.inserting_before(node):
            made = layer(nn.Linear, tensors, {})
            kept = f"{CONSTANT}_" if is_made(str(factors["weight"].target)) else ""
            lifted = add_module(gm.graph, f"{kept}{node.name}_layer", made, (factors["input"],))
        lifted.meta = dict(node.meta)
        erase(node, lifted)
    return reported(gm, "lift_products", sites)


def _factors(node: fx.Node) -> dict[str, Any]:
    """Input, weight and bias of a product by a matrix; nothing if `node` is none, or scales it."""
    if node.op not in ("call_function", "call_method") or node.kwargs:
        return {}
    names: tuple[str, ...] = ("input", "weight")
    if node.target in _ADDING:
        names = ("bias", *names)
    elif node.target not in (*_PRODUCTS, *_OF_MATRICES):
        return {}
    return dict(zip(names, node.args, strict=True)) if len(node.args) == len(names) else {}


def _constant(gm: fx.GraphModule, factors: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a linear layer that multiplies by a matrix; nothing if that is no constant."""
    tensors = {}
    for name in factors.keys() - {"input"}:
        node = factors[name]
        if not isinstance(node, fx.Node) or node.op != "get_attr":
            return {}
        tensors[name] = attribute(gm, str(node.target))
    if len({is_made(str(factors[name].target)) for name in tensors}) > 1:
        return {}
    matrix, bias = tensors["weight"], tensors.get("bias")
    if not isinstance(matrix, Tensor) or matrix.ndim != 2 or not matrix.is_floating_point():
        return {}
    if bias is not None and bias.shape != matrix.shape[1:]:
        return {}
    return tensors | {"weight": matrix.t()}


def _of_matrices(node: fx.Node, factor: Any) -> bool:
    """Whether what is multiplied is known to be a matrix: of anything else torch makes an error."""
    if node.target in _EXPORTED:
        return True
    return len(shape_at(factor) or ()) == 2 or rank_of(factor) == 2
