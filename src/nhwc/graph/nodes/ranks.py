"""The number of dimensions that a traced value must have, derived from the node that made it."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from ...operators.kinds import arithmetic_of, keeps_rank, torchs_name
from ..modules.leaves import is_leaf
from ..modules.mended import Attention
from .edit import attribute, module_of, numbers_given
from .seen import shape_at

_KEEPING_HOMES = (
    "torch.nn.modules.activation",
    "torch.nn.modules.pooling",
    "nhwc.operators.spelled",
)

_PARTS = ("chunk", "split", "tensor_split")

Ranks = dict[fx.Node, int | None]


def rank_of(node: fx.Node) -> int | None:
    """Return the number of dimensions of the tensor that `node` stands for; None if unknown.

    It assumes that convolutions get batches; without a batch there is one dimension fewer.
    """
    return ranks_of(node.graph)[node]


def ranks_of(graph: fx.Graph, *, sure: bool = False) -> dict[fx.Node, int | None]:
    """`rank_of` for every node; `sure` if nothing shall be assumed of what convolutions get."""
    ranks: Ranks = {}
    for node in graph.nodes:
        assumed = sure and isinstance(module_of(node), _ConvNd) and shape_at(node) is None
        ranks[node] = None if assumed else _rank(node, ranks)
    return ranks


def _rank(node: fx.Node, ranks: Ranks) -> int | None:
    shape = shape_at(node)
    if shape is not None:
        return len(shape)
    module = module_of(node)
    if module is not None:
        return rank_after(module, _rank_in(node, 0, ranks))
    if node.op == "get_attr":
        owner = node.graph.owning_module
        value = None if owner is None else attribute(owner, str(node.target))
        return value.ndim if isinstance(value, Tensor) else None
    return rank_of_call(node, ranks) if node.op in ("call_function", "call_method") else None


def rank_of_call(node: fx.Node, ranks: Ranks) -> int | None:
    """The rank of what a function or method returns that is given values of these ranks."""
    name = torchs_name(node.target)
    if keeps_rank(name):
        return _rank_in(node, 0, ranks)
    operands = 3 if name == "scaled_dot_product_attention" else 2 * bool(arithmetic_of(name))
    if operands:
        known = [_rank_in(node, place, ranks) for place in range(operands)]
        return None if None in known else max(rank or 0 for rank in known)
    if name in ("view", "reshape", "expand"):
        shape = numbers_given(node)
        # A shape that is given by name is not looked for.
        return len(shape) if isinstance(shape, list | tuple) and shape else None
    if name == "flatten":
        return _flat(_argument(node, 1, "start_dim", 0), _argument(node, 2, "end_dim", -1))
    if name in ("unsqueeze", "stack"):
        given: Any = node.args[0] if node.args else None
        rank = ranks.get(given[0] if isinstance(given, list | tuple) else given)
        return None if rank is None else rank + 1
    if name == "getitem":
        return _rank_of_part(node, ranks)
    if name in ("cat", "concat", "concatenate"):
        joined = node.args[0] if node.args else None
        parts = joined if isinstance(joined, list | tuple) else ()
        # What is empty has one dimension beside tensors of any other number.
        return max((rank for part in parts if (rank := ranks.get(part) or 0) > 1), default=None)
    if name == "reshape_as":
        return _rank_in(node, 1, ranks)
    return _reduced(node, ranks) if name in ("mean", "sum", "amax") else None


def _rank_of_part(node: fx.Node, ranks: Ranks) -> int | None:
    """The rank of a slice, or of one of the parts of a tensor that was split."""
    source, index = node.args
    if not isinstance(source, fx.Node):
        return None
    if torchs_name(source.target) in _PARTS:
        return _rank_in(source, 0, ranks) if isinstance(index, int) else None
    slices = isinstance(index, tuple) and all(isinstance(one, slice) for one in index)
    return ranks.get(source) if slices else None


def _rank_in(node: fx.Node, place: int, ranks: Ranks) -> int | None:
    """Return the rank of an operand, which is 0 for a number."""
    value = node.args[place] if len(node.args) > place else None
    if isinstance(value, int | float):
        return 0
    return ranks.get(value) if isinstance(value, fx.Node) else None


def asks_rank(node: fx.Node) -> bool:
    """Whether `node` is the number of dimensions of a tensor."""
    if node.op == "call_method":
        return node.target == "dim"
    return node.target is getattr and node.args[1] == "ndim"


def rank_after(module: Any, given: int | None) -> int | None:
    """The rank of what a layer returns that is given a value of this rank.

    >>> rank_after(nn.Flatten(), None), rank_after(nn.ReLU(), 4), rank_after(nn.Sequential(), 4)
    (2, 4, None)
    """
    if not is_leaf(module):
        return None
    if isinstance(module, nn.Flatten):
        return _flat(module.start_dim, module.end_dim)
    if isinstance(module, _ConvNd | _BatchNorm):
        digit = re.search(r"([123])d", str(module._get_name()))
        # BatchNorm1d takes (N, C) and (N, C, L) alike.
        if digit and (isinstance(module, _ConvNd) or digit[1] != "1"):
            return int(digit[1]) + 2
    keeps = isinstance(
        module,
        _DropoutNd | _BatchNorm | nn.Linear | nn.Identity | nn.LayerNorm | nn.RMSNorm | Attention,
    )
    return given if keeps or type(module).__module__.startswith(_KEEPING_HOMES) else None


def _flat(start: object, end: object) -> int | None:
    return start + 1 if isinstance(start, int) and start >= 0 and end == -1 else None


def _reduced(node: fx.Node, ranks: Ranks) -> int | None:
    dims, keep = _argument(node, 1, "dim", None), _argument(node, 2, "keepdim", False)
    rank = _rank_in(node, 0, ranks)
    if rank is None or not isinstance(dims, int | list | tuple) or not isinstance(keep, bool):
        return None
    gone = 1 if isinstance(dims, int) else len(dims)
    return rank if keep else rank - gone


def _argument(node: fx.Node, place: int, name: str, default: object) -> object:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)
