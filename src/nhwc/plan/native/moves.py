"""What moves tokens: in a program it costs nothing until somebody needs another order."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ...graph.mended import FromTokens
from ...kernels.programs.builder import Builder
from ...kernels.programs.moved import Moved
from ..implementation import Implementation
from ..others import caller
from ..recording import Record, Seen
from ..specs import Layer
from .rows import as_it_lies

_MOST = 1 << 27
"""The most numbers of a tensor whose places are noted."""

_METHODS = {
    *("reshape", "view", "flatten", "unflatten", "permute", "transpose", "movedim", "moveaxis"),
    *("swapaxes", "swapdims", "unbind", "chunk", "split", "tensor_split", "squeeze", "unsqueeze"),
    *("expand", "contiguous", "clone", "roll", "select", "narrow", "flip", "repeat", "tile", "t"),
    *("repeat_interleave", "mT", "T"),
}
_FUNCTIONS = {getattr(torch, name) for name in _METHODS if callable(getattr(torch, name, None))}
_MODULES = (nn.Flatten, nn.Unflatten, FromTokens, nn.Identity, nn.Dropout)


def moving(graph: fx.GraphModule, record: Record, layer: Layer) -> Implementation | None:
    """The movement that a node is, which costs nothing as long as nobody needs its order."""
    if not is_movement(graph, layer.node) or len(layer.inputs) != 1:
        return None
    seen = record.values[layer.inputs[0]]
    function = caller(graph, record, layer.node)
    padded = layer.node.target is F.pad
    if isinstance(seen, tuple):
        if layer.node.target is not operator.getitem or not isinstance(layer.node.args[1], int):
            return None
        number = layer.node.args[1]
        return as_it_lies(record, layer, lambda builder, _, parts: parts[number], free=True)
    if math.prod(seen.shape) > _MOST or not _moves(function, padded, seen, record, layer.node):
        return None

    def emit(builder: Builder, constants: None, x: Moved) -> Any:
        return _each(_places(function, padded, x.where), lambda where: Moved(x.buffer, where))

    return as_it_lies(record, layer, emit, free=True)


def is_movement(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Whether `node` does no more than to put the numbers of one tensor into another order."""
    if node.op == "call_module":
        module = graph.get_submodule(str(node.target))
        hooked = module._forward_hooks or module._forward_pre_hooks
        still = not (isinstance(module, nn.Dropout) and module.training)
        return type(module) in _MODULES and still and not hooked
    if node.op == "call_method":
        return node.target in _METHODS
    if node.target is F.pad:
        given = dict(zip(("input", "pad", "mode", "value"), node.args, strict=False)) | node.kwargs
        return given.get("mode", "constant") == "constant" and not given.get("value")
    return node.target is operator.getitem or node.target in _FUNCTIONS


def _moves(
    function: Callable[..., Any], padded: bool, seen: Seen, record: Record, node: fx.Node
) -> bool:
    """Whether places can be moved as the data was."""
    try:
        found = _places(function, padded, torch.arange(math.prod(seen.shape)).view(seen.shape))
    except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
        return False
    shapes = lambda value: _each(value, lambda one: tuple(one.shape))
    return bool(shapes(found) == shapes(record.values[node]))


def _places(function: Callable[..., Any], padded: bool, where: Tensor) -> Any:
    """Where the numbers of the result lie."""
    if padded:
        return function(where + 1) - 1
    try:
        return function(where)
    except RuntimeError:
        # `view` of what torch's result would let it: places may have other strides.
        return function(where.contiguous())


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """`change` of a tensor, or of each of several."""
    return tuple(map(change, value)) if isinstance(value, (tuple, list)) else change(value)
