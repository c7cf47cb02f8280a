"""Small questions about nodes that several rewrites ask."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from ..graph import module_of
from ..graph.leaves import opaque_by_nature
from ..operators.activations import FUNCTIONS, MODULES

ADDITIONS = (operator.add, operator.iadd, torch.add, "add", "add_")


def activation_of(node: fx.Node) -> nn.Module | None:
    """Return an activation module that does the same as `node`; None if it is no activation."""
    module = module_of(node)
    if module is not None:
        fit = type(module) in MODULES and not opaque_by_nature(module)
        return module if fit and "forward" not in vars(module) else None
    if node.op not in ("call_function", "call_method") or node.target not in FUNCTIONS:
        return None
    rest = node.args[1:]
    options = {k: v for k, v in node.kwargs.items() if k not in ("inplace", "input")}
    if any(isinstance(value, fx.Node) for value in (*rest, *options.values())):
        return None
    return FUNCTIONS[node.target](*rest, **options).eval()


TO_LAST, TO_IMAGE = (0, 2, 3, 1), (0, 3, 1, 2)
"""The permutations from N, C, H, W to N, H, W, C and back."""


def permutation(node: fx.Node) -> tuple[int, ...] | None:
    """Return the order of dimensions that a call of `permute` asks for."""
    if node.target not in ("permute", torch.permute):
        return None
    given: Any = node.args[1:] or (node.kwargs.get("dims"),)
    dims = given[0] if len(given) == 1 else given
    if not isinstance(dims, (tuple, list)) or not all(isinstance(dim, int) for dim in dims):
        return None
    return tuple(dim % len(dims) for dim in dims)


def only_user(node: fx.Node) -> fx.Node | None:
    """Return the node that uses `node` if there is exactly one."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def named_arguments(node: fx.Node, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def size_read(node: object) -> tuple[fx.Node, int] | None:
    """Return the value and the dimension if `node` reads a size: `x.size(1)`, `x.shape[1]`, ..."""
    if not isinstance(node, fx.Node):
        return None
    if node.op == "call_method" and node.target == "size" and len(node.args) == 2:
        source, dim = node.args
    elif node.target is operator.getitem:
        shape, dim = node.args
        if not isinstance(shape, fx.Node) or not _is_shape(shape):
            return None
        source = shape.args[0]
    else:
        return None
    if not isinstance(source, fx.Node) or not isinstance(dim, int):
        return None
    return source, dim % 4 if dim < 0 else dim


def _is_shape(node: fx.Node) -> bool:
    if node.op == "call_method" and node.target == "size":
        return len(node.args) == 1
    return node.target is getattr and node.args[1] == "shape"
