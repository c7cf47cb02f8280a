"""Fold a batch norm into the convolution before it, or the one after it if that pads no zeros."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ..graph import erase, module_of, replace_module
from ..graph.modules.leaves import is_frozen_batch_norm
from ..graph.report import PassReport, Site
from ._arithmetic import fold_after, fold_before, frozen, promoted, scale_and_shift, undoable
from ._folding_sites import (
    called_again,
    calls_of,
    folded_before,
    input_of,
    is_batch_norm,
    layer_unfit,
    name_of,
    norm_unfit,
    owners_of,
    pads_zeros,
    readers,
    rows_around,
    tied_note,
    weight_read_elsewhere,
)
from ._ranks import takes_batches
from ._reporting import reported

Owners = dict[Tensor, list[str]]

_FROZEN = "a FrozenBatchNorm2d is one for images, and this convolution is not"


def fold_bn_into_conv(gm: fx.GraphModule) -> PassReport:
    """Fold every batch norm that comes directly after a convolution, or directly before one."""
    sites: list[Site] = []
    done: set[fx.Node] = set()
    owners = owners_of(gm)
    for node in list(gm.graph.nodes):
        if node in done or not is_batch_norm(module_of(node)):
            continue
        before, after = input_of(node), _only_reader(node)
        if isinstance(module_of(before), _ConvNd):
            assert before is not None
            sites += _fold_back(before, node, done, owners)
        elif isinstance(module_of(after), _ConvNd):
            assert after is not None
            sites.append(_fold_forward(node, after, owners))
        elif rows_around(node) is None and not any(
            isinstance(module_of(beside), nn.Linear) for beside in (before, after)
        ):
            sites.append(_skip(node, name_of(node), _lone(before)))
    return reported(gm, "fold_bn_into_conv", sites)


def _fold_back(conv: fx.Node, norm: fx.Node, done: set[fx.Node], owners: Owners) -> list[Site]:
    what = f"{name_of(conv)} + {name_of(norm)}"
    layer, batch_norm = module_of(conv), module_of(norm)
    assert layer is not None
    assert batch_norm is not None
    calls = calls_of(conv)
    reason = (
        norm_unfit(batch_norm)
        or layer_unfit(layer)
        or folded_before(layer)
        or _other_reader(conv, norm)
        or _other_follower(calls, batch_norm)
        or weight_read_elsewhere(conv)
    )
    folded = None
    if reason is None:
        batches = all(takes_batches(call, layer, batch_norm) for call in calls)
        folded, reason = _folded(layer, batch_norm, batches)
    if folded is None:
        return [_skip(norm, what, reason or "")]
    note = tied_note(conv, owners)
    for call in calls:
        [follower] = readers(call)
        done.add(follower)
        erase(follower, call)
    replace_module(calls[0], folded)
    for call in calls[1:]:
        call.target = calls[0].target
    if len(calls) > 1:
        note = f"called at {len(calls)} sites, each followed by this batch norm"
    return [Site(name_of(norm), what, True, note)] * len(calls)


def _folded(layer: Any, norm: Any, batches: bool) -> tuple[nn.Module | None, str | None]:
    scale, shift = scale_and_shift(norm)
    if len(scale) != layer.out_channels:
        return None, f"{len(scale)} features do not fit {layer.out_channels} output channels"
    folded = fold_after(layer, scale, shift)
    if folded is None:
        return None, f"the folded weights do not fit {layer.weight.dtype}"
    if is_frozen_batch_norm(norm):
        if norm.weight.dtype != layer.weight.dtype:
            return None, f"the norm is {norm.weight.dtype}, the weights are {layer.weight.dtype}"
        folded = promoted(folded)
    if batches:
        return folded, None
    if is_frozen_batch_norm(norm):
        either = frozen(folded)
        return either, None if either else _FROZEN
    either = undoable(folded, layer, scale, shift)
    lost = "its input may come without a batch, and for that the fold could not be undone"
    return either, None if either else lost


def _fold_forward(norm: fx.Node, conv: fx.Node, owners: Owners) -> Site:
    what = f"{name_of(norm)} + {name_of(conv)}"
    layer: Any = module_of(conv)
    batch_norm: Any = module_of(norm)
    reason = (
        norm_unfit(batch_norm)
        or layer_unfit(layer)
        or folded_before(layer)
        or weight_read_elsewhere(conv)
        or called_again(conv)
    )
    if reason is None and isinstance(layer, _ConvTransposeNd):
        reason = "it comes before a transposed convolution, whose borders see less of the shift"
    if reason is not None:
        return _skip(norm, what, reason)
    source = input_of(norm)
    assert source is not None
    batches = takes_batches(source, layer, batch_norm)
    if not batches and not is_frozen_batch_norm(batch_norm):
        return _skip(norm, what, "its input may come without a batch, and is another then")
    scale, shift = scale_and_shift(batch_norm)
    if len(scale) != layer.in_channels:
        return _skip(norm, what, f"{len(scale)} features, {layer.in_channels} input channels")
    if pads_zeros(layer) and bool(shift.any()):
        return _skip(norm, what, "the convolution after it pads with zeros, which have no shift")
    folded = fold_before(layer, scale, shift)
    if folded is None:
        return _skip(norm, what, f"the folded weights do not fit {layer.weight.dtype}")
    either = folded if batches else frozen(folded)
    if either is None:
        return _skip(norm, what, _FROZEN)
    note = tied_note(conv, owners)
    norm.append(conv)  # Where the norm stands: its input may be overwritten behind it.
    erase(norm, source)
    replace_module(conv, either)
    return Site(name_of(norm), what, True, note)


def _only_reader(node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def _other_reader(conv: fx.Node, norm: fx.Node) -> str | None:
    others = [user for user in readers(conv) if user is not norm]
    if not others:
        return None
    return f"the output of {name_of(conv)} is also used by {name_of(others[0])}"


def _other_follower(calls: list[fx.Node], norm: nn.Module) -> str | None:
    for call in calls:
        users = readers(call)
        if len(users) != 1 or module_of(users[0]) is not norm:
            return (
                f"the convolution is called at {len(calls)} sites, not all before this batch norm"
            )
    return None


def _lone(before: fx.Node | None) -> str:
    source = name_of(before) if before is not None else "nowhere"
    if source.endswith("()") and source.rpartition(".")[2].startswith("conv"):
        return f"a weight or an argument of {source} is computed while the model runs"
    return f"its input comes from {source}, not from a convolution"


def _skip(norm: fx.Node, what: str, reason: str) -> Site:
    return Site(name_of(norm), what, False, reason)
