"""Norms by the root of the mean square that are spelled out, as one call.

    x --+--> x * x --> mean over one dimension --> + eps --> rsqrt --+
        |                                                            v
        +----------------------------------------------------------> * -->

Most models have them so, since torch has the norm itself (`nn.RMSNorm`) only since 2.4. Casts to
float32 of what is float32 may stand in between. What others read of it is computed for them, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..graph import bound, module_of
from ..graph.modules.ordered import Reduced
from ..operators.kinds import arithmetic_of, torchs_name, without_writing
from .recording import Record

_CASTS = ("to", "float", "type_as")


class Root(NamedTuple):
    """A norm of `source` over the dimension `dim`, of which `node` is the last call."""

    node: fx.Node
    source: fx.Node
    dim: int
    eps: float


def over_root_mean_square(x: Tensor, dim: int, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(dim, keepdim=True) + eps)


def roots_in(graph: fx.GraphModule, record: Record) -> list[Root]:
    """The norms that a graph spells out."""
    return [root for node in graph.graph.nodes for root in _of(record, node)]


def write_root(graph: fx.Graph, root: Root) -> None:
    """Call the norm in the place of its last call; nodes are those of `graph`."""
    with graph.inserting_before(root.node):
        call = graph.call_function(over_root_mean_square, (root.source, root.dim, root.eps))
    root.node.replace_all_uses_with(call)
    _erase(graph, root.node)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a call that nobody reads, and with it what it alone read, as far as the source."""
    read = node.all_input_nodes
    graph.erase_node(node)
    for one in read:
        if not one.users and one.op.startswith("call_"):
            _erase(graph, one)


def _of(record: Record, node: fx.Node) -> Iterator[Root]:
    """The norm that ends with this call, if one does."""
    pair = node.args
    if len(pair) != 2 or node.kwargs or not all(isinstance(one, fx.Node) for one in pair):
        return
    called = called_name(node)
    ways = {"mul": (("rsqrt", *pair), ("rsqrt", *pair[::-1])), "div": (("sqrt", *pair),)}
    for wanted, x, root in ways.get(called, ()):
        source, mean = _uncast(record, x), _meant(record, root, wanted)
        seen = record.tensor(source)
        if mean is None or seen is None or seen.dtype is not torch.float32:
            continue
        squared, dim, eps = mean
        if _squared(record, squared) is source:
            yield Root(node, source, dim, eps)
            return


def _meant(record: Record, root: Any, called: str) -> tuple[Any, int, float] | None:
    """Of what the root is: the tensor, the one dimension of its mean, and what is added."""
    root = _uncast(record, root)
    total: Any = root.args[0] if called_name(root) == called and len(root.args) == 1 else None
    if called_name(total) != "add" or len(total.args) != 2 or total.kwargs:
        return None
    number, other = sorted(total.args, key=lambda one: type(one) is not float)
    mean, eps = _uncast(record, other), number
    module = module_of(mean)
    if isinstance(module, Reduced):
        given = {"input": mean.args[0], "dim": module.dims, "keepdim": module.keepdim}
        given = given if module.kind == "mean" else {}
    else:
        given = bound(mean, ("input", "dim", "keepdim")) if called_name(mean) == "mean" else {}
    dim = given.get("dim")
    dim = dim[0] if isinstance(dim, (tuple, list)) and len(dim) == 1 else dim
    plain = given.keys() == {"input", "dim", "keepdim"} and given["keepdim"] is True
    if not plain or type(dim) is not int or type(eps) is not float:
        return None
    return given["input"], dim, eps


def _squared(record: Record, node: Any) -> Any:
    """What is squared; None if nothing is."""
    node = _uncast(record, node)
    called = called_name(node)
    if called == "square" or (called == "pow" and node.args[1:] in ((2,), (2.0,))):
        return None if node.kwargs else _uncast(record, node.args[0])
    if called == "mul" and len(node.args) == 2 and not node.kwargs:
        one, other = (_uncast(record, factor) for factor in node.args)
        return one if one is other else None
    return None


def _uncast(record: Record, value: Any) -> Any:
    """What `value` was before casts that change nothing."""
    while isinstance(value, fx.Node) and called_name(value) in _CASTS:
        before = value.args[0]
        seen, source = record.tensor(value), record.tensor(before)  # type: ignore[arg-type]
        if seen is None or source is None or seen.dtype is not source.dtype:
            break
        value = before
    return value


def called_name(node: Any) -> str:
    """The name of the function or method that a node calls, as if it wrote into nothing."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return ""
    name = without_writing(torchs_name(node.target))
    return arithmetic_of(name) or name
