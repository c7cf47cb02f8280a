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
from ..graph.modules.mended import ChannelNorm, FromTokens
from ..graph.modules.ordered import Reduced, Repeat, Softmax
from ..graph.nodes.computed import is_computed_from_arguments
from ..graph.nodes.memory import exposed, memory_of
from ..operators.activations import MODULES
from ..operators.kinds import arithmetic_of
from .recording import Record, Seen

_TO_LAST, _TO_IMAGE = (0, 2, 3, 1), (0, 3, 1, 2)
_OF_MATRICES = {
    *(F.scaled_dot_product_attention, operator.matmul, torch.matmul, "matmul"),
}
_EXCHANGES = {
    *("transpose", "swapaxes", "swapdims", torch.transpose, torch.swapaxes, torch.swapdims),
}
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
        known = all(map(record.is_given, sources))
        if not known or node in record.fixed or not _is_tensor(record, node):
            continue
        computed = is_computed_from_arguments(node) or _is_layer(node)
        if computed and node not in changing:
            record.constant.add(node)


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
    name = str(getattr(node.target, "__name__", node.target))
    known = arithmetic_of(name) is not None and not node.kwargs and not record.is_given(node)
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
    """
    for node in graph.graph.nodes:
        image = record.image(node)
        if image is not None and math.prod(image.shape[2:]) == 1:
            continue
        mixed = any(map(_mixes_last, (node, *node.users)))
        if record.is_given(node) or mixed:
            record.tokens.add(node)
        elif node.op.startswith("call_") and not _is_of_images(node):
            turned = _permutation(node)
            of_tokens = any(
                one in record.tokens and one.op != "get_attr" for one in node.all_input_nodes
            )
            if turned == _TO_LAST or (turned != _TO_IMAGE and of_tokens):
                record.tokens.add(node)


def _mixes_last(node: fx.Node) -> bool:
    """Whether `node` is a layer over the last dimension, attention, or of matrices."""
    module = module_of(node)
    op = module.op if isinstance(module, Fused) else module
    known = isinstance(op, nn.LayerNorm | nn.RMSNorm | nn.Linear) and not isinstance(
        op, ChannelNorm
    )
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
