"""How many dimensions traced values surely have: other ones, the code would have refused by now.

A convolution takes one image or a batch of them. But what is behind a BatchNorm2d, `x.flatten(2)`
or `b, c, h, w = x.shape` has one number of dimensions alone. So there is one answer to
`len(x.shape)`, to `x.dim() == 4`, and to how many sizes there are in `x.shape[2:]`. The same is
true of `x.shape[1]` where a norm, a convolution or a linear layer made the channels, and so of the
number of `x.chunk(2, 1)`.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from ...operators import activations
from ...operators.kinds import arithmetic_of
from ..modules.leaves import definer, is_leaf
from ..nodes.edit import held, numbers_given
from ..nodes.ranks import Ranks, asks_rank, rank_after, rank_of_call
from .functions import is_of_no_user

_BATCHES: dict[type, int] = {nn.BatchNorm2d: 4, nn.BatchNorm3d: 5}
"""Layers that refuse any other number of dimensions."""

_MAKING = (torch.empty, torch.zeros, torch.ones)
"""Functions whose first argument may be the sizes of what they return."""

_KEEPING = (*activations.MODULES, _DropoutNd, nn.Identity)
"""Layers whose result has the shape of what they are given."""


_IN_PAIRS = (nn.RNNBase, nn.LSTMCell, nn.MultiheadAttention)
"""Layers that return two values, the second of which may be two more."""

_PAIRS = ("sort", "topk", "kthvalue", "mode", "cummax", "cummin", "aminmax")
_BY_DIMENSION = ("max", "min", "median", "nanmedian")
"""Functions that return values and their places; these where they are told a dimension."""

_PARTING = (
    *("chunks", "split_size_or_sections", "split_size", "split_sizes"),
    *("sections", "indices", "indices_or_sections"),
)
"""What `chunk`, `split` and `tensor_split` call their argument, as functions and as methods."""


class SureRanks:
    """Answers about the values in the graph of `root`, whose `opaque` parts may return anything."""

    def __init__(self, root: nn.Module, opaque: Collection[str]) -> None:
        self._root, self._opaque = root, opaque
        self._ranks: Ranks = {}

    def note_unpacked(self, sizes: fx.Node, count: int) -> None:
        """Note that code has assigned `x.shape` to so many variables."""
        if _is_shape(sizes) and isinstance(sizes.args[0], fx.Node):
            self._note(sizes.args[0], count)

    def _note(self, node: fx.Node, rank: int) -> None:
        """Note what is sure of this value, and so of what its convolutions were given."""
        while self._ranks.get(node) is None:
            self._ranks[node] = rank
            keeps = isinstance(self._layer(node), (_ConvNd, *_BATCHES))
            if not keeps or not node.args or not isinstance(node.args[0], fx.Node):
                return
            node = node.args[0]

    def length(self, node: fx.Node) -> int | None:
        """How many sizes there are in `x.shape`, or values in what a call returns; None if nobody
        knows."""
        self._settle(node.graph)
        count = self._sizes(node)
        if count is None:
            count = self._returned(node)
        return self._parts(node) if count is None else count

    def number(self, node: fx.Node) -> Any:
        """What is computed from numbers of dimensions alone, if these are known; else None."""
        self._settle(node.graph)
        return self._number(node)

    def _settle(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            self._note_asserted(node)
            if self._ranks.get(node) is None:
                self._ranks[node] = self._rank(node)

    def _note_asserted(self, node: fx.Node) -> None:
        """Note what `torch._assert(x.ndim == 4, ...)` makes sure."""
        told: Any = node.args[0] if node.target is torch._assert else None
        if isinstance(told, fx.Node) and told.target is operator.eq:
            asked, rank = told.args
            of = asked.args[0] if isinstance(asked, fx.Node) and asks_rank(asked) else None
            if isinstance(of, fx.Node) and type(rank) is int:
                self._note(of, rank)

    def _sizes(self, node: fx.Node) -> int | None:
        if _is_shape(node):
            return self._rank_of(node.args[0])
        if node.target is operator.add and isinstance(node.args[1], tuple):
            whole: Any = node.args[0]
            count = self._sizes(whole) if isinstance(whole, fx.Node) else None
            return None if count is None else count + len(node.args[1])
        if node.target is not operator.getitem or not isinstance(node.args[1], slice):
            return None
        part = node.args[1]
        known = all(type(one) is int or one is None for one in (part.start, part.stop, part.step))
        whole = node.args[0]
        count = self._sizes(whole) if known and isinstance(whole, fx.Node) else None
        return None if count is None else len(range(count)[part])

    def _returned(self, node: fx.Node) -> int | None:
        """How many values a layer or a function returns that returns several, whatever it gets."""
        layer = self._layer(node)
        if layer is not None:
            indices = getattr(layer, "return_indices", False)
            return 2 if isinstance(layer, _IN_PAIRS) or indices is True else None
        name, given = self._called(node)
        if name in _BY_DIMENSION:
            return 2 if type(given) is int or "dim" in node.kwargs else None
        return 2 if name in _PAIRS else None

    def _parts(self, node: fx.Node) -> int | None:
        """Into how many a tensor is parted, along a dimension whose size is known if need be."""
        name, given = self._called(node)
        if given is None:
            given = next((node.kwargs[key] for key in _PARTING if key in node.kwargs), None)
        if isinstance(given, list | tuple) and name in ("split", "split_with_sizes"):
            return len(given)
        if name == "tensor_split":
            return len(given) + 1 if isinstance(given, list | tuple) else _count(given)
        if name not in ("chunk", "split", "unbind"):
            return None
        place = 1 if name == "unbind" else 2
        dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
        of: Any = node.args[0] if node.args else None
        rank = self._rank_of(of)
        size = self._channels(of, dim % rank) if rank and type(dim) is int else None
        if name == "unbind" or not size:
            return size
        count = _count(given)
        each = count if name == "split" else count and -(-size // count)
        return -(-size // each) if each else None

    def _called(self, node: fx.Node) -> tuple[str, Any]:
        """The name of a function or method of torch's, and what it is given behind its tensor."""
        given = node.args[1] if len(node.args) > 1 else None
        if node.op == "call_method":
            return "" if self._is_of_opaque(node.args[0]) else str(node.target), given
        called: Any = node.target
        of_torch = node.op == "call_function" and is_of_no_user(called)
        return getattr(called, "__name__", "") if of_torch else "", given

    def _is_of_opaque(self, value: Any) -> bool:
        """Whether an opaque part returned it, alone or among others: it may be of any class."""
        while isinstance(value, fx.Node) and value.target in (operator.getitem, getattr):
            value = value.args[0]
        return isinstance(value, fx.Node) and value.target in self._opaque

    def _number(self, value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value if type(value) is int else None
        if asks_rank(value) and not value.kwargs:
            return self._rank_of(value.args[0])
        of = _channels_asked(value)
        if of is not None:
            return self._channels(of) if self._rank_of(of) else None
        if getattr(value.target, "__module__", "") != "_operator" or not callable(value.target):
            return None
        numbers = [*map(self._number, value.args)]
        return None if None in numbers else value.target(*numbers)

    def _rank_of(self, value: Any) -> int | None:
        return self._ranks.get(value) if isinstance(value, fx.Node) else None

    def _rank(self, node: fx.Node) -> int | None:
        if node.op == "get_attr":
            value = held(self._root, str(node.target))
            return value.ndim if isinstance(value, Tensor) else None
        called: Any = node.target
        if node.op == "call_method" or (node.op == "call_function" and is_of_no_user(called)):
            return self._rank_of_call(node)
        layer = self._layer(node)
        given: Any = node.args[0] if node.args else None
        if layer is None or not isinstance(given, fx.Node):
            return None
        rank = _BATCHES.get(definer(type(layer), "_check_input_dim"))
        if rank is not None:
            self._note(given, rank)
            return rank
        known = self._ranks.get(given)
        return known if isinstance(layer, _ConvNd | _BatchNorm) else rank_after(layer, known)

    def _rank_of_call(self, node: fx.Node) -> int | None:
        name = getattr(node.target, "__name__", node.target)
        given = numbers_given(node)
        turned = _turned(node)
        if turned is not None and isinstance(node.args[0], fx.Node):
            self._note(node.args[0], len(turned))
            return len(turned)
        made = _sizes_made(node)
        if made is not None:
            return len(made)
        if name in ("view", "reshape") and isinstance(given, fx.Node) and not node.kwargs:
            return self._sizes(given)
        if node.target is F.batch_norm:
            return self._rank_of(node.args[0])
        if name == "matmul":
            ranks = [self._ranks.get(one) or 0 for one in node.all_input_nodes]
            return max(ranks) if min(ranks) >= 2 else None
        return rank_of_call(node, self._ranks)

    def _channels(self, node: fx.Node, dim: int = 1) -> int | None:
        """How many channels an image has, of known rank, that layers or arithmetic made, or code of
        such sizes; they lie in `dim`, where `permute` may have put them."""
        layer, rank = self._layer(node), self._rank_of(node)
        given = [one for one in node.args if isinstance(one, fx.Node)]
        turned = _turned(node)
        if turned is not None:
            return self._channels(given[0], turned[dim] % len(turned))
        made, ends = _sizes_made(node), _last_sizes(node, layer)
        if made is not None:
            size = made[dim] if len(made) > dim else None
            return size if type(size) is int else None
        if ends and given and rank is not None:
            return ends[dim - rank] if dim >= rank - len(ends) else self._channels(given[0], dim)
        if dim == 1:
            known = self._channels_of_layer(node, layer)
            if known is not None:
                return known
        # A part of the model may be called "relu" or "add", too.
        called = node.target if node.op in ("call_function", "call_method") else None
        if isinstance(layer, _KEEPING) or called in activations.FUNCTIONS:
            return self._channels(given[0], dim) if given else None
        ranks = {*map(self._rank_of, given)}
        arithmetic = arithmetic_of(str(getattr(called, "__name__", called)))
        if not arithmetic or len(node.args) != 2 or len(ranks) != 1 or None in ranks:
            return None
        # One channel is repeated.
        return next((found for one in given if (found := self._channels(one, dim) or 1) > 1), None)

    def _channels_of_layer(self, node: fx.Node, layer: nn.Module | None) -> int | None:
        """How many channels, in their usual place, a convolution or a batch norm returns."""
        if layer is not None and definer(type(layer), "_check_input_dim") in _BATCHES:
            told = layer._parameters.get("weight"), layer._buffers.get("running_mean")
            return next((len(one) for one in told if one is not None), None)
        if isinstance(layer, _ConvNd) and not layer.transposed:
            batched = self._rank_of(node) == len(layer.kernel_size) + 2
            return len(layer.weight) if batched else None
        if node.target is not F.batch_norm:
            return None
        mean: Any = node.args[1] if len(node.args) > 1 else None
        read = isinstance(mean, fx.Node) and mean.op == "get_attr"
        return len(held(self._root, str(mean.target))) if read else None

    def _layer(self, node: fx.Node) -> nn.Module | None:
        """The layer of torch's that this node calls, if it is one."""
        if node.op != "call_module" or node.target in self._opaque:
            return None
        layer = self._root.get_submodule(str(node.target))
        return layer if is_leaf(layer) else None


def _turned(node: fx.Node) -> list[int] | tuple[int, ...] | None:
    """The dimensions that `permute` is given, each of them a number."""
    method = node.op == "call_method" and node.target == "permute"
    if not method and node.target is not torch.permute:
        return None
    dims = numbers_given(node)
    plain = isinstance(dims, list | tuple) and all(type(one) is int for one in dims)
    return dims if plain and dims and not node.kwargs else None


def _sizes_made(node: fx.Node) -> tuple[Any, ...] | None:
    """The sizes that code gives what it makes, one by one or as a list."""
    if node.op != "call_function" or node.target not in _MAKING or not node.args:
        return None
    first = node.args[0]
    if isinstance(first, list | tuple):
        return tuple(first)
    # One that is computed may be all of them.
    return node.args if len(node.args) > 1 else None


def _last_sizes(node: fx.Node, layer: nn.Module | None) -> tuple[int, ...]:
    """The last sizes of what a linear layer or a layer norm returns; none of anything else."""
    if isinstance(layer, nn.Linear):
        return (len(layer.weight),)
    if isinstance(layer, nn.LayerNorm):
        return tuple(layer.normalized_shape)
    shape: Any = node.args[1] if node.target is F.layer_norm and len(node.args) > 1 else ()
    plain = isinstance(shape, list | tuple) and all(type(one) is int for one in shape)
    return tuple(shape) if plain else ()


def _channels_asked(node: fx.Node) -> fx.Node | None:
    """The x of `x.shape[1]` or `x.size(1)`."""
    if node.op == "call_method" and node.target == "size":
        found = node.args[0] if node.args[1:] == (1,) and not node.kwargs else None
    else:
        read = node.target is operator.getitem and node.args[1] == 1
        shape = node.args[0] if read else None
        found = shape.args[0] if isinstance(shape, fx.Node) and _is_shape(shape) else None
    return found if isinstance(found, fx.Node) else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _is_shape(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target == "size" and len(node.args) == 1 and not node.kwargs
    return node.target is getattr and node.args[1] == "shape"
