"""What moves tokens: in a program it costs nothing until somebody needs another order."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ...graph import bound
from ...graph.modules.frames import FromFrames, ToFrames
from ...graph.modules.leaves import runs_hooks
from ...graph.modules.mended import FromTokens
from ...graph.modules.ordered import Repeat
from ...kernels.programs.builder import Builder
from ...kernels.programs.moved import Moved
from ..following import is_blank
from ..implementation import Implementation
from ..others import caller
from ..recording import Record, Seen
from ..specs import Layer
from .rows import as_it_lies

_MOST = 1 << 27
"""The most numbers of a tensor whose places are noted."""

_METHODS = {
    *("reshape", "view", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze"),
    *("permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims", "t"),
    *("unbind", "chunk", "split", "tensor_split", "hsplit", "vsplit", "dsplit"),
    *("select", "narrow", "diagonal", "unfold", "take"),
    *("index_select", "gather", "take_along_dim"),
    *("expand", "broadcast_to", "repeat", "tile", "repeat_interleave"),
    *("roll", "flip", "fliplr", "flipud", "rot90", "contiguous", "clone", "detach"),
}
_FUNCTIONS = {getattr(torch, name) for name in _METHODS if callable(getattr(torch, name, None))}
_MODULES: tuple[type[nn.Module], ...] = (
    *(nn.Flatten, nn.Unflatten, FromTokens, ToFrames, FromFrames, Repeat, nn.Identity, nn.Dropout),
    *(nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle, nn.Unfold),
)
_FUNCTIONS |= {F.pixel_shuffle, F.pixel_unshuffle, F.channel_shuffle, F.unfold}
_LIKE = {"expand_as": "expand", "view_as": "reshape", "reshape_as": "reshape"}
"""What is given a tensor for its shape alone."""
_CASTS = {"to", "type_as", "type", "float", torch.as_tensor}
"""What kernels of float32 see of these changes nothing."""


def moving(graph: fx.GraphModule, record: Record, layer: Layer) -> Implementation | None:
    """The movement that a node is, which costs nothing as long as nobody needs its order."""
    function = _movement(graph, record, layer)
    if function is None:
        return None
    source = layer.inputs.index(layer.node.args[0]) if len(layer.inputs) > 1 else 0
    seen = record.values[layer.inputs[source]]
    if isinstance(seen, tuple):
        if layer.node.target is not operator.getitem or not isinstance(layer.node.args[1], int):
            return None
        number = layer.node.args[1]
        return as_it_lies(record, layer, lambda builder, _, parts: parts[number], free=True)
    if math.prod(seen.shape) > _MOST or not _moves(function, seen, record, layer.node):
        return None

    def emit(builder: Builder, constants: None, *given: Moved) -> Any:
        x = given[source]
        return _each(_places(function, x.where), lambda where: Moved(x.buffer, where))

    return as_it_lies(record, layer, emit, free=True)


def _movement(graph: fx.GraphModule, record: Record, layer: Layer) -> Callable[..., Any] | None:
    """The function that moves a tensor, or the places of its numbers; None if nothing does."""
    node = layer.node
    if node.op == "call_method" and node.target in _LIKE and node.args[0] in layer.inputs:
        # The second tensor is given for its shape alone.
        shape, method = record.values[node].shape, _LIKE[str(node.target)]
        return lambda where: getattr(where, method)(shape)
    casts = node.op != "call_module" and node.target in _CASTS and node.args
    if casts and node.args[0] in layer.inputs:
        return lambda where: where
    if len(layer.inputs) != 1:
        return None
    if is_blank(node):
        shape = record.values[node].shape
        return lambda where: where.new_full(shape, -1)
    if not is_movement(graph, node):
        return None
    call = caller(graph, record, node)
    if node.target is F.pad:
        # What is padded is found nowhere.
        return lambda where: call(where + 1) - 1
    module = graph.get_submodule(str(node.target)) if node.op == "call_module" else None
    if node.target is F.unfold or type(module) is nn.Unfold:
        # Torch has it for floats alone; doubles count as far as any memory goes.
        return lambda where: (call(where.double() + 1) - 1).to(where.dtype)
    return call


def is_movement(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Whether `node` does no more than to put the numbers of one tensor into another order."""
    if node.op == "call_module":
        module = graph.get_submodule(str(node.target))
        still = not (isinstance(module, nn.Dropout) and module.training)
        return type(module) in _MODULES and still and not runs_hooks(module)
    if node.op == "call_method":
        return node.target in _METHODS
    if node.target is F.pad:
        given = bound(node, ("input", "pad", "mode", "value"))
        return given.get("mode", "constant") == "constant" and not given.get("value")
    if node.target is getattr:
        return node.args[1] in ("mT", "T")
    return node.target is operator.getitem or node.target in _FUNCTIONS


def _moves(function: Callable[..., Any], seen: Seen, record: Record, node: fx.Node) -> bool:
    """Whether places can be moved as the data was."""
    count = math.prod(seen.shape)
    try:
        found = _places(function, torch.arange(count).view(seen.shape))
    except (RuntimeError, TypeError, IndexError, ValueError, NotImplementedError):
        return False
    shapes = lambda value: _each(value, lambda one: tuple(one.shape))
    return bool(shapes(found) == shapes(record.values[node]))


def _places(function: Callable[..., Any], where: Tensor) -> Any:
    """Where the numbers of the result lie."""
    try:
        return function(where)
    except RuntimeError:
        # `view` of what torch's result would let it: places may have other strides.
        return function(where.contiguous())


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """`change` of a tensor, or of each of several."""
    return tuple(map(change, value)) if isinstance(value, (tuple, list)) else change(value)
