"""Mix the channels of an image where it has fewest pixels.

y = conv1x1(resize(x))                      y = resize(conv1x1(x))
y = conv1x1(cat([b, resize(a)], 1))    ->   y = conv1x1(b) + resize(conv1x1(a))
y = avg_pool(conv1x1(x))                    y = conv1x1(avg_pool(x))

A pixel of an enlarged or averaged image is a mean of pixels, by weights whose sum is one. A 1x1
convolution gives the same of that mean as the mean of what it gives of the pixels. Heads that
segment images (SegFormer, HRNet, LR-ASPP) or estimate depth (DPT) spend much of their time in the
first, the transitions of DenseNet in the last.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..graph import add_module, bound, erase, erase_unused, module_of, replace_module
from ..graph.modules.folded import PROMOTED
from ..graph.modules.leaves import is_leaf, opaque_by_nature
from ..graph.nodes.seen import note_side, shape_at
from ..graph.report import PassReport, Site
from ._arithmetic import promoted
from ._folding_sites import input_of, is_batch_norm, layer_unfit, name_of, written_between
from ._matching import activation_of, is_own
from ._reporting import reported
from .lift_functional import layer
from .mend_interpolate import is_one_pixel

_CATS = (torch.cat, torch.concat)
_OF_POOL = (
    *("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad"),
    "divisor_override",
)

_FEWER = 1.5
"""Where there are not so many times fewer pixels, a convolution is left where it is."""

_PRODUCTS = 32
"""So many products must be saved for each number that is resized or added more than before."""


def move_mixing(gm: fx.GraphModule) -> PassReport:
    """Move 1x1 convolutions before a resize that enlarges, and behind an average of windows."""
    sites = _drop_those_of_own_size(gm)
    for node in list(gm.graph.nodes):
        conv: Any = module_of(node)
        if not mixes_channels(conv):
            continue
        name, where = name_of(node), _moved(node, conv)
        if where:
            sites.append(Site(name, where, True))
    return reported(gm, "move_mixing", sites)


def _moved(node: fx.Node, conv: Any) -> str:
    """Move a convolution, and say where it is now; empty if it stays."""
    source = input_of(node)
    resize = _resize(source, conv)
    if resize is not None and resize.pays(conv.in_channels, conv):
        _swap(resize.node, node)
        return "before its input is enlarged"
    parts = _parts(source, conv)
    if any(part.resize for part in parts):
        _split(node, conv, parts)
        return "before its input is enlarged"
    pool = _average(node, conv)
    if pool is None:
        return ""
    _swap_back(node, conv, pool)
    return "behind the average of its result"


def _drop_those_of_own_size(gm: fx.GraphModule) -> list[Site]:
    """Remove the calls that resize an image to the size that it has, for convolutions and joins."""
    sites = []
    for node in list(gm.graph.nodes):
        image, users, sizes = input_of(node), [*node.users], _sizes_of(node)
        # A factor says where pixels lie, also if it is too small to add any.
        by_size = sizes is not None and sizes[1] is None and shape_at(node) is not None
        same = by_size and shape_at(node) == shape_at(image)
        if same and image is not None and users and all(map(_only_reads, users)):
            sites.append(Site(name_of(node), "a resize to its own size", True))
            erase(node, image)
    return sites


def _only_reads(user: fx.Node) -> bool:
    return user.target in _CATS or mixes_channels(module_of(user))


def _pays(products: int, ratio: float, more: int) -> bool:
    """Whether it saves more than it costs to compute so many products for so many times fewer
    pixels, and to resize or add so many numbers more for each.
    """
    return products * (1 - 1 / ratio) > _PRODUCTS * more


@dataclass(frozen=True)
class _Resize:
    """A call that gives so many pixels for each that it reads."""

    node: fx.Node
    ratio: float

    def pays(self, channels: int, conv: Any, *, added: bool = False) -> bool:
        """Whether to convolve these channels before saves more than it costs; the result may have
        more channels to resize, and perhaps is one more image that is `added`.
        """
        products = channels * conv.out_channels // conv.groups
        more = conv.out_channels - channels + added * conv.out_channels
        return _pays(products, self.ratio, more)


@dataclass(frozen=True)
class _Part:
    """One of the images that are joined by channels, and how it is enlarged, if it pays."""

    node: fx.Node
    channels: int
    resize: _Resize | None


def mixes_channels(conv: Any) -> bool:
    """Whether it is a convolution of single pixels, in a type whose sums may be taken apart."""
    if not isinstance(conv, nn.Conv2d | nn.Conv3d) or not is_leaf(conv) or layer_unfit(conv):
        return False
    single = {*conv.kernel_size, *conv.stride} == {1} and not any(conv.padding)
    return bool(single and conv.weight.dtype in (torch.float32, torch.float64))


def _resize(node: Any, conv: Any) -> _Resize | None:
    """The call that enlarges an image for one reader alone."""
    sizes = _sizes_of(node) if is_own(node) else None
    if sizes is None or is_one_pixel(input_of(node)):
        return None
    size, factor = sizes
    factors = factor if isinstance(factor, list | tuple) else [factor] * len(conv.kernel_size)
    ratio = _ratio(node, size, factors)
    return _Resize(node, ratio) if ratio >= _FEWER else None


def _sizes_of(node: fx.Node) -> tuple[Any, Any] | None:
    """The size, or the factors, that a call is given which resizes an image; None if it is none."""
    module: Any = module_of(node)
    if isinstance(module, nn.Upsample) and is_leaf(module) and not opaque_by_nature(module):
        return module.size, module.scale_factor
    if node.target is not F.interpolate:
        return None
    given = bound(node, ("input", "size", "scale_factor"))
    return given.get("size"), given.get("scale_factor")


def _ratio(node: fx.Node, size: Any, factors: Sequence[Any]) -> float:
    """How many pixels there are for each; 0 if that is unknown.

    Who takes the size from another image enlarges this one to it.
    """
    before, after = shape_at(input_of(node)), shape_at(node)
    if before and after:
        return math.prod(after[2:]) / max(1, math.prod(before[2:]))
    if all(isinstance(one, int | float) for one in factors):
        return float(math.prod(factors))
    sizes = size if isinstance(size, list | tuple) else (size,)
    return 4.0 if any(isinstance(one, fx.Node) for one in sizes) else 0.0


def _parts(joined: Any, conv: Any) -> list[_Part]:
    """The images whose channels `joined` has one after the other, for this convolution alone."""
    if not is_own(joined) or joined.target not in _CATS or conv.groups > 1:
        return []
    given = bound(joined, ("tensors", "dim"))
    images = given.get("tensors")
    if given.get("dim", 0) != 1 or not isinstance(images, list | tuple):
        return []
    if len({*images}) != len(images):
        return []
    channels = [_channels(image) for image in images]
    if None in channels:
        return []
    parts = []
    for image, count in zip(images, channels, strict=True):
        resize, count = _resize(image, conv), count or 0
        pays = resize is not None and resize.pays(count, conv, added=True)
        parts.append(_Part(image, count, resize if pays else None))
    return parts


def _channels(node: Any) -> int | None:
    """How many channels an image has, if its shape was seen or a layer tells."""
    shape, module = shape_at(node), module_of(node)
    if shape:
        return shape[1]
    if isinstance(module, nn.Conv2d | nn.Conv3d):
        return int(module.out_channels)
    same = is_batch_norm(module) or isinstance(module, nn.Upsample) or activation_of(node)
    if same or getattr(node, "target", None) is F.interpolate:
        return _channels(input_of(node))
    return None


def _swap(resize: fx.Node, conv: fx.Node) -> None:
    """Let `resize` enlarge what `conv` gives of its input."""
    image = input_of(resize)
    assert image is not None
    with conv.graph.inserting_before(resize):
        before = conv.graph.call_module(str(conv.target), (image,))
    before.meta = dict(conv.meta)
    _enlarge(resize, image, before, module_of(conv))
    erase(conv, resize)


def _average(node: fx.Node, conv: Any) -> fx.Node | None:
    """The average of windows that alone reads a convolution, where it pays to average before."""
    pool = next(iter(node.users)) if is_own(node) else None
    module: Any = module_of(pool)
    if pool is None:
        return None
    if isinstance(module, nn.AvgPool2d | nn.AvgPool3d):
        plain = is_leaf(module) and not opaque_by_nature(module)
        given = {name: getattr(module, name, None) for name in _OF_POOL[1:]} if plain else {}
    else:
        given = bound(pool, _OF_POOL) if pool.target in (F.avg_pool2d, F.avg_pool3d) else {}
    size, padding = given.get("kernel_size"), given.get("padding", 0)
    step = given.get("stride") or size
    steps = step if isinstance(step, list | tuple) else [step] * len(conv.kernel_size)
    if not all(type(one) is int for one in steps) or given.get("divisor_override") is not None:
        return None
    padded = any(padding) if isinstance(padding, list | tuple) else padding != 0
    ratio, more = math.prod(steps), conv.in_channels - conv.out_channels
    pays = ratio >= _FEWER and _pays(conv.weight.numel(), ratio, more)
    image = input_of(node)
    return None if padded or not pays or written_between([image], node, pool) else pool


def _swap_back(node: fx.Node, conv: Any, pool: fx.Node) -> None:
    """Let `conv` mix what `pool` gives of its input."""
    image = input_of(node)
    assert image is not None
    if isinstance(conv, nn.Conv3d) and conv.weight.is_cpu:
        # Autocast for CPUs averages volumes in float32, and so the model ends in.
        replace_module(node, promoted(conv))
    with node.graph.inserting_after(pool):
        mixed = node.graph.call_module(str(node.target), (pool,))
    pool.replace_all_uses_with(mixed, delete_user_cb=lambda user: user is not mixed)
    pool.replace_input_with(node, image)
    mixed.meta = dict(node.meta)
    note_side(mixed, pool, 1, conv.out_channels)
    note_side(pool, pool, 1, conv.in_channels)
    node.graph.erase_node(node)


def _split(node: fx.Node, conv: Any, parts: Sequence[_Part]) -> None:
    """Convolve each part that is enlarged by itself, the others together, and add all."""
    graph, bias, sums, whole = node.graph, conv.bias, [], input_of(node)
    columns = conv.weight.detach().split([part.channels for part in parts], 1)
    rest = [(part.node, some) for part, some in zip(parts, columns, strict=True) if not part.resize]
    with graph.inserting_before(node):
        if rest:
            images, weights = zip(*rest, strict=True)
            joined = graph.call_function(torch.cat, ([*images], 1)) if len(rest) > 1 else images[0]
            sums = [_mixed(node, conv, joined, torch.cat(weights, 1), bias)]
            bias = None
    for part, weight in zip(parts, columns, strict=True):
        if part.resize is not None:
            image = input_of(part.node)
            assert image is not None
            with graph.inserting_before(part.node):
                before = _mixed(node, conv, image, weight, bias)
            bias = None
            _enlarge(part.node, image, before, conv)
            sums.insert(0, part.node)
    with graph.inserting_before(node):
        # The convolution of the rest comes last: its kernel adds the others as it ends.
        total = reduce(lambda one, other: graph.call_function(operator.add, (one, other)), sums)
    erase(node, total)
    erase_unused(whole)


def _mixed(node: fx.Node, conv: Any, image: fx.Node, weight: Tensor, bias: Any) -> fx.Node:
    """A call of the convolution that `node` calls, with some of its columns."""
    tensors = {"weight": weight.contiguous()} | ({} if bias is None else {"bias": bias})
    mixing = layer(nn.Conv2d if weight.ndim == 4 else nn.Conv3d, tensors, {})
    if isinstance(conv, PROMOTED):
        mixing = promoted(mixing)
    mixing.train(conv.training).weight.requires_grad_(conv.weight.requires_grad)
    call = add_module(node.graph, f"{node.name}_part", mixing, (image,))
    call.meta = dict(node.meta)
    return call


def _enlarge(resize: fx.Node, image: fx.Node, mixed: fx.Node, conv: Any) -> None:
    """Let `resize` read `mixed`, what a convolution gives of its `image`."""
    resize.replace_input_with(image, mixed)
    note_side(mixed, image, 1, conv.out_channels)
    note_side(resize, resize, 1, conv.out_channels)
