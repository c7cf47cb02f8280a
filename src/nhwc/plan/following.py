"""What follows from a record: which tensors are constants of the plan, and which are tokens."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ..graph import module_of
from ..graph.modules.layers import Fused
from ..graph.modules.leaves import is_leaf, opaque_by_nature
from ..graph.modules.mended import ChannelNorm, FromTokens, SpelledNorm
from ..graph.modules.ordered import Reduced, Repeat, Softmax
from ..graph.nodes.computed import is_computed_from_arguments
from ..graph.nodes.memory import exposed, memory_of
from ..operators.activations import MODULES
from ..operators.kinds import PUTTING_IN, arithmetic_of, torchs_name
from .recording import Record, Seen

_TO_LAST, _TO_IMAGE = (0, 2, 3, 1), (0, 3, 1, 2)
_OF_MATRICES = {
    *(F.scaled_dot_product_attention, operator.matmul, torch.matmul, "matmul"),
}
_EXCHANGES = {
    *("transpose", "swapaxes", "swapdims", torch.transpose, torch.swapaxes, torch.swapdims),
}
_BLANK = {"zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty"}
_FILLED = {"full_like", "new_full", "ones_like", "new_ones"}
"""What has none of a tensor's numbers: nothing, or one number throughout."""
_TAKES = {"getitem", "index_select", "gather", "take", "take_along_dim"}
_MOST = 1 << 20
"""The most numbers of a constant that is the same throughout."""
_STEADY = (Fused, nn.Embedding, nn.LayerNorm, nn.Linear, nn.RMSNorm, nn.Softmax)
"""Layers that are often given parameters alone, or numbers of positions."""
_OF_IMAGES = {
    f"torch.nn.modules.{name}"
    for name in ("conv", "batchnorm", "instancenorm", "pooling", "upsampling", "pixelshuffle")
}


def note_constants(graph: fx.GraphModule, record: Record) -> None:
    """Note what depends on parameters and shapes alone, unless somebody may write into it.

    Layers of torch's are among it: Swin's second version computes its biases of positions so, and
    CLIP looks up those of all its patches.
    """
    changing = exposed(graph.graph) | memory_of(*(target for _, target in record.writes))
    for node in graph.graph.nodes:
        sources = [one for one in node.all_input_nodes if one not in record.fixed]
        known = all(map(record.is_given, sources)) or _is_filled(record, node, sources)
        if not known or node in record.fixed or not _is_tensor(record, node):
            continue
        computed = is_computed_from_arguments(node) or _is_layer(node)
        if computed and node not in changing:
            record.constant.add(node)


def note_places(record: Record) -> None:
    """Note constants that only say which numbers of a tensor are taken: these are known.

    Then `x[:, order]` is a movement as `x[:, ::2]` is. What scans an image in several orders takes
    its pixels so.
    """
    for node, value in record.made.items():
        taken = not value.is_floating_point() and record.is_given(node) and bool(node.users)
        if taken and all(_is_taken_by(node, user) for user in node.users):
            record.fixed.add(node)
            record.values[node] = value


def _is_taken_by(places: fx.Node, user: fx.Node) -> bool:
    return _name(user) in _TAKES and places not in user.args[:1]


def _is_filled(record: Record, node: fx.Node, sources: list[fx.Node]) -> bool:
    """Whether one number that is known is all of it, and a tensor is given for its shape."""
    seen = record.tensor(node)
    small = seen is not None and math.prod(seen.shape) <= _MOST
    return small and _name(node) in _FILLED and len(sources) == 1 and not is_blank(node)


def is_blank(node: fx.Node) -> bool:
    """Whether `node` makes zeros, or what nothing is written to."""
    if _name(node) in ("full", "full_like", "new_full"):
        value = node.kwargs["fill_value"] if "fill_value" in node.kwargs else node.args[-1]
        return isinstance(value, int | float) and not value and math.copysign(1, value) > 0
    return _name(node) in _BLANK


def _name(node: fx.Node) -> str:
    return torchs_name(node.target)


def note_numbers(record: Record) -> None:
    """Note constants of whole numbers that only arithmetic of floats reads: kernels get floats.

    Torch makes floats of them in each call. Deformable attention divides by the sides of images.
    """
    for node, seen in record.values.items():
        if not isinstance(seen, Seen) or seen.dtype.is_floating_point or seen.dtype.is_complex:
            continue
        if record.is_given(node) and all(_is_of_floats(record, user) for user in node.users):
            record.whole.add(node)
            record.values[node] = replace(seen, dtype=torch.float32)
            if node in record.made:
                record.made[node] = record.made[node].float()


def _is_of_floats(record: Record, node: fx.Node) -> bool:
    """Whether `node` is arithmetic that torch does in float32, and no constant itself."""
    seen = record.tensor(node)
    known = arithmetic_of(_name(node)) is not None and not node.kwargs and not record.is_given(node)
    return known and seen is not None and seen.dtype is torch.float32


def _is_layer(node: fx.Node) -> bool:
    """Whether `node` calls a layer that computes the same for the same, as long as it has the same
    weights; with others a plan is made anew."""
    module = module_of(node)
    if isinstance(module, (Reduced, Repeat, Softmax)):
        # They stand for functions, and have neither weights nor a mode.
        return True
    if isinstance(module, nn.Embedding) and module.max_norm is not None:
        return False  # It writes into its weights.
    if module is None or not isinstance(module, (*_STEADY, *MODULES)):
        return False
    return not module.training and is_leaf(module) and opaque_by_nature(module) is None


def note_tokens(graph: fx.GraphModule, record: Record) -> None:
    """Note the tensors whose channels are last, as those of Swin are in all four dimensions.

    To be wrong costs a copy, no more: our kernels take either. Images of one pixel lie the same
    whichever they are, and serve those that they meet: a gate that linear layers computed, say.
    Clips of images, N, T, C, H, W, look like volumes, and are moved as tokens are until they are
    images again. So is a part that others are put into.
    """
    moved: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if _is_of_clips(record, node, moved) or _is_put_into(node):
            moved.add(node)
            record.tokens.add(node)
            continue
        image = record.image(node)
        if image is not None and math.prod(image.shape[2:]) == 1:
            continue
        mixed = any(map(_mixes_last, (node, *node.users)))
        if record.is_given(node) or mixed:
            record.tokens.add(node)
        elif node.op.startswith("call_") and not _is_of_images(node):
            turned = _permutation(node)
            of_tokens = any(
                one in record.tokens - moved and one.op != "get_attr"
                for one in node.all_input_nodes
            )
            if turned == _TO_LAST or (turned != _TO_IMAGE and of_tokens):
                record.tokens.add(node)


def _is_of_clips(record: Record, node: fx.Node, clips: set[fx.Node]) -> bool:
    """Whether `node` tells the images of several clips apart, or moves such images."""
    image, sources = record.image(node), node.all_input_nodes
    if image is None or len(image.shape) != 5 or not node.op.startswith("call_"):
        return False
    if not clips.isdisjoint(sources):
        return not _is_of_images(node)
    seen = record.image(sources[0]) if sources else None
    new = seen is not None and sources[0] not in record.tokens
    return new and image.shape[2:] == seen.shape[1:]  # type: ignore[union-attr]


def _is_put_into(node: fx.Node) -> bool:
    """Whether `node` takes a part of a tensor for others to be put into."""
    readers = [user for user in node.users if user.users or user.op == "output"]
    filled = all(user.target in PUTTING_IN and user.args[0] is node for user in readers)
    return node.target in (operator.getitem, "select") and bool(readers) and filled


def _mixes_last(node: fx.Node) -> bool:
    """Whether `node` is a layer over the last dimension, attention, or of matrices."""
    module = module_of(node)
    op = module.op if isinstance(module, Fused) else module
    known = isinstance(op, nn.LayerNorm | nn.RMSNorm | nn.Linear) and not isinstance(
        op, ChannelNorm
    )
    known = known or (isinstance(op, SpelledNorm) and op.dim == -1)
    return known or node.target in _OF_MATRICES or _turns_matrices(node)


def _turns_matrices(node: fx.Node) -> bool:
    """Whether `node` exchanges the last two dimensions."""
    return node.target in _EXCHANGES and {*node.args[1:]} in ({-1, -2}, {2, 3})


def _permutation(node: fx.Node) -> Any:
    """The order of dimensions that a call of `permute` asks for."""
    if node.target not in ("permute", torch.permute):
        return None
    given = node.args[1:]
    return tuple(given[0]) if given and isinstance(given[0], (tuple, list)) else given


def _is_of_images(node: fx.Node) -> bool:
    module = module_of(node)
    op = module.op if isinstance(module, Fused) else module
    return isinstance(op, FromTokens) or type(op).__module__ in _OF_IMAGES


def _is_tensor(record: Record, node: fx.Node) -> bool:
    value = record.values.get(node)
    several = value if isinstance(value, tuple) and value else (value,)
    return all(isinstance(one, Seen) for one in several)
