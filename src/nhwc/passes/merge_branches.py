"""Merge convolutions of one value whose results are added into a single one.

Networks such as RepVGG, MobileOne and FastViT are trained with parallel branches, and their authors
merge these for inference. All that is linear in one value x is one convolution of it:

    conv3x3(x) + conv1x1(x) + norm(x) - scale * x

         . . .     . . .     . . .          a 1x1 convolution is the tap in the middle of a larger
         . a .  +  . b .  +  . c .  ...     one, and so is a norm, or x itself, which sees only its
         . . .     . . .     . . .          own channel

It is merged only into a convolution that is there already and as large as any, so that nothing is
computed that was not computed before. The weights are added in float64 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graph import add_module, attribute, module_of
from ..graph.modules.folded import PROMOTED, SummedConv2d
from ..graph.modules.leaves import is_frozen_batch_norm
from ..graph.nodes.ranks import asks_rank
from ..graph.report import PassReport, Site
from ..operators.kinds import writes_first
from ._arithmetic import frozen, promoted, scale_and_shift, twin, with_weights
from ._folding_sites import (
    called_again,
    folded_before,
    input_of,
    is_batch_norm,
    layer_unfit,
    name_of,
    norm_unfit,
    weight_read_elsewhere,
    written_between,
)
from ._matching import arithmetic
from ._ranks import takes_batches
from ._reporting import reported

Numbers = float | Tensor
"""A number for all channels, or one for each in float64."""


def merge_branches(gm: fx.GraphModule) -> PassReport:
    """Replace each sum of convolutions of one value, and of that value itself, by one of them."""
    sites = []
    gone: set[fx.Node] = set()
    for root in reversed(list(gm.graph.nodes)):
        if root in gone or not _combines(root):
            continue
        for source in _sources(root):
            found = _Tree(gm, source).read(root)
            if found is None or not found.branches > 1 or not found.convs:
                continue
            what = " + ".join(name_of(one.node) for one in found.convs)
            merged, reason = _merged(root, source, found)
            sites.append(Site(name_of(root), what, merged is not None, reason))
            if merged is not None:
                _replace(root, source, found, merged)
                gone.update(found.inner)
                break
    return reported(gm, "merge_branches", sites[::-1])


@dataclass(frozen=True)
class _Conv:
    """A convolution of the source, and what its result is multiplied by."""

    node: fx.Node
    factor: Numbers = 1.0

    @property
    def layer(self) -> Any:
        return module_of(self.node)


@dataclass(frozen=True)
class _Sum:
    """convolutions(source) + own * source + shift; `inner` are the nodes that compute it.

    A node comes before those it reads. The result is `batched` if even that of one image is. It
    `promotes` to the widest of these types; None stands for that of the source.
    """

    convs: tuple[_Conv, ...] = ()
    own: Numbers = 0.0
    shift: Numbers = 0.0
    has_own: bool = False
    inner: tuple[fx.Node, ...] = field(default=())
    batched: bool = False
    promotes: frozenset[torch.dtype | None] = frozenset()

    @property
    def branches(self) -> int:
        return len(self.convs) + self.has_own

    def plus(self, other: _Sum) -> _Sum:
        return _Sum(
            (*self.convs, *other.convs),
            self.own + other.own,
            self.shift + other.shift,
            self.has_own or other.has_own,
            (*self.inner, *other.inner),
            self.batched or other.batched,
            self.promotes | other.promotes,
        )

    def times(self, factor: Numbers) -> _Sum:
        return _Sum(
            tuple(_Conv(one.node, one.factor * factor) for one in self.convs),
            self.own * factor,
            self.shift * factor,
            self.has_own,
            self.inner,
            self.batched,
            self.promotes,
        )


@dataclass(frozen=True)
class _Tree:
    """Reads values as sums of what is linear in `source`."""

    gm: fx.GraphModule
    source: fx.Node

    def read(self, value: Any, root: bool = True) -> _Sum | None:
        if type(value) in (int, float):
            return _Sum(shift=float(value))
        if value is self.source:
            return _Sum(own=1.0, has_own=True, promotes=frozenset({None}))
        if not isinstance(value, fx.Node) or not (root or _read_once(value)):
            return None
        found = self._computed(value)
        if found is None:
            return None
        return replace(found, inner=(value, *found.inner))

    def _computed(self, node: fx.Node) -> _Sum | None:
        layer = module_of(node)
        if isinstance(layer, nn.Conv2d):
            alone = node.args == (self.source,) and not node.kwargs
            own = frozenset({layer.weight.dtype} if isinstance(layer, PROMOTED) else ())
            return _Sum((_Conv(node),), shift=_bias(layer), promotes=own) if alone else None
        if layer is not None:
            return self._normed(node, layer) if is_batch_norm(layer) else None
        kind = arithmetic(node)
        if kind is None or len({*node.args}) != 2 or node.kwargs:
            return None
        if kind == "mul":
            return self._scaled(node)
        first, second = (self.read(one, root=False) for one in node.args)
        if first is None or second is None or kind not in ("add", "sub"):
            return None
        total = first.plus(second if kind == "add" else second.times(-1.0))
        return replace(total, promotes=first.promotes) if writes_first(node.target) else total

    def _normed(self, node: fx.Node, norm: nn.Module) -> _Sum | None:
        value = input_of(node)
        if value is None or norm_unfit(norm) or is_frozen_batch_norm(norm):
            return None
        found = self.read(value, root=False)
        if found is None:
            return None
        scale, shift = scale_and_shift(norm)
        image = nn.Conv2d(1, 1, 1)
        if not takes_batches(value, image, norm) and not takes_batches(node, image, norm):
            return None
        return found.times(scale).plus(_Sum(shift=shift))

    def _scaled(self, node: fx.Node) -> _Sum | None:
        for value, other in (node.args, node.args[::-1]):
            factor = self._factor(other)
            if factor is not None:
                found = self.read(value, root=False)
                if found is None:
                    return None
                scaled = found.times(_flat(factor))
                if not isinstance(factor, Tensor) or not factor.ndim:
                    return scaled
                own = () if writes_first(node.target) else (factor.dtype,)
                return scaled.plus(_Sum(batched=factor.ndim == 4, promotes=frozenset(own)))
        return None

    def _factor(self, value: Any) -> Numbers | None:
        """The number, or the constant for each channel, that a value is multiplied by."""
        if type(value) in (int, float):
            return float(value)
        if not isinstance(value, fx.Node) or value.op != "get_attr":
            return None
        held = attribute(self.gm, str(value.target))
        if not isinstance(held, Tensor) or held.is_meta or not held.is_floating_point():
            return None
        spread = held.ndim in (3, 4) and held.shape == (
            *[1] * (held.ndim - 3),
            len(held.flatten()),
            1,
            1,
        )
        return held.detach() if spread or held.shape in ((), (1,)) else None


def _flat(factor: Numbers) -> Numbers:
    if not isinstance(factor, Tensor):
        return factor
    return float(factor) if factor.numel() == 1 else factor.double().flatten()


def _bias(layer: Any) -> Numbers:
    return 0.0 if layer.bias is None else layer.bias.detach().double()


def _combines(node: fx.Node) -> bool:
    return arithmetic(node) in ("add", "sub", "mul") or is_batch_norm(module_of(node))


def _sources(root: fx.Node) -> Iterator[fx.Node]:
    """The values that convolutions below `root` read, with nothing but arithmetic between."""
    found: dict[fx.Node, None] = {}
    todo = [*root.all_input_nodes]
    while todo:
        node = todo.pop()
        if isinstance(module_of(node), nn.Conv2d):
            found.update(dict.fromkeys(node.all_input_nodes))
        elif _combines(node) and _read_once(node):
            todo += node.all_input_nodes
    yield from found


def _read_once(node: fx.Node) -> bool:
    return len([user for user in node.users if not asks_rank(user)]) == 1


def _merged(root: fx.Node, source: fx.Node, found: _Sum) -> tuple[nn.Module | None, str]:
    """The one convolution, or why there is none."""
    widest: Any = max(
        (one.layer for one in found.convs), key=lambda conv: conv.weight[0, 0].numel()
    )
    reasons = (
        *(check(one.node) for one in found.convs for check in _NODE_CHECKS),
        *(check(one.layer) for one in found.convs for check in (layer_unfit, folded_before)),
        *(_unlike(one.layer, widest) for one in found.convs),
        _of_other_type(found.promotes - {None, widest.weight.dtype}),
        _own_unfit(widest) if found.has_own else None,
        written_between([source], source, root),
    )
    reason = next(filter(None, reasons), None)
    if reason is not None:
        return None, reason
    try:
        weight, bias = _weights(widest, found)
    except RuntimeError:
        return None, "its constants are not one for each channel"
    merged = with_weights(widest, weight, bias)
    if merged is None:
        return None, f"the merged weights do not fit {widest.weight.dtype}"
    merged = _typed(merged, found.promotes)
    return (frozen(merged) if found.batched else merged), ""


def _of_other_type(types: frozenset[torch.dtype | None]) -> str | None:
    return f"a factor is {min(map(str, types))}, and the weights are not" if types else None


def _typed(conv: Any, promotes: frozenset[torch.dtype | None]) -> Any:
    """`conv`, whose result has the type of the sum that it stands for."""
    if promotes - {None}:
        return promoted(conv)
    if promotes or isinstance(conv, PROMOTED):
        conv = twin(conv)
        conv.__class__ = SummedConv2d if promotes else nn.Conv2d
    return conv


_NODE_CHECKS: tuple[Callable[[fx.Node], str | None], ...] = (called_again, weight_read_elsewhere)


def _unlike(conv: Any, widest: Any) -> str | None:
    """Why the taps of `conv` are none of `widest`; None if they lie in its middle."""
    if any(one.padding_mode != "zeros" or isinstance(one.padding, str) for one in (conv, widest)):
        return "the padding of a branch is not a number of zeros"
    same = ("stride", "groups", "in_channels", "out_channels")
    if any(getattr(conv, name) != getattr(widest, name) for name in same):
        return "the branches differ in stride, groups or channels"
    if conv.weight.dtype != widest.weight.dtype:
        return "the branches differ in type"
    for side in range(2):
        size, most = conv.kernel_size[side], widest.kernel_size[side]
        apart = widest.dilation[side]
        moved = widest.padding[side] - conv.padding[side]
        if size > most or (size > 1 and conv.dilation[side] != apart):
            return "no branch has the taps of all others"
        if moved < 0 or moved % apart or (most - size) * apart != 2 * moved:
            return "the branches see different places"
    return None


def _own_unfit(conv: Any) -> str | None:
    centred = all(
        (size - 1) * apart == 2 * pad
        for size, apart, pad in zip(conv.kernel_size, conv.dilation, conv.padding, strict=True)
    )
    if conv.in_channels == conv.out_channels and conv.stride == (1, 1) and centred:
        return None
    return "the value itself is no branch of this size"


def _weights(widest: Any, found: _Sum) -> tuple[Tensor, Tensor]:
    there = {"dtype": torch.float64, "device": widest.weight.device}
    channels = torch.ones(widest.out_channels, **there)
    weight = torch.zeros(widest.weight.shape, **there)
    high, wide = weight.shape[2:]
    for one in found.convs:
        r, s = one.layer.kernel_size
        top, left = (high - r) // 2, (wide - s) // 2
        each = (channels * one.factor).reshape(-1, 1, 1, 1)
        weight[:, :, top : top + r, left : left + s] += one.layer.weight.detach().double() * each
    if found.has_own:
        number = torch.arange(len(weight))
        weight[number, number % weight.shape[1], high // 2, wide // 2] += channels * found.own
    return weight, channels * found.shift


def _replace(root: fx.Node, source: fx.Node, found: _Sum, merged: nn.Module) -> None:
    graph = root.graph
    with graph.inserting_before(root):
        name = f"{found.convs[-1].node.target}_merged".replace(".", "_")
        call = add_module(graph, name, merged.train(found.convs[0].layer.training), (source,))
    call.meta = dict(root.meta)
    root.replace_all_uses_with(call)
    for node in found.inner:
        for asking in list(node.users):
            asking.replace_input_with(node, source)
        graph.erase_node(node)
