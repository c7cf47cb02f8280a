"""Fold a batch norm into the linear layer before it, or into the one after it.

The fold is right only for (N, C) tensors: in a (N, L, C) tensor a batch norm scales dimension 1,
while a linear layer works on the last. If the graph does not show the number of dimensions, the
folded layer keeps what it needs to undo the fold. Some code flattens (N, L, C) to rows for the
batch norm and reshapes its result back; that is folded if the graph shows three dimensions.
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from ..graph import erase, module_of, replace_module
from ..graph.modules.leaves import is_frozen_batch_norm
from ..graph.nodes.ranks import rank_of
from ..graph.report import PassReport, Site
from ._arithmetic import fold_after, fold_before, scale_and_shift, undoable
from ._folding_sites import (
    called_again,
    input_of,
    is_batch_norm,
    layer_unfit,
    name_of,
    norm_unfit,
    owners_of,
    readers,
    rows_around,
    tied_note,
    weight_read_elsewhere,
)
from ._reporting import reported


def fold_bn_into_linear(gm: fx.GraphModule) -> PassReport:
    """Fold every batch norm that comes directly after a linear layer, or directly before one."""
    sites = []
    for node in list(gm.graph.nodes):
        if not is_batch_norm(module_of(node)):
            continue
        before = input_of(node)
        after = next(iter(node.users)) if len(node.users) == 1 else None
        rows = rows_around(node)
        if rows is not None:
            flat, again = rows
            linear = flat.all_input_nodes[0]
            sites.append(_fold(node, linear, node, linear, (flat, again)))
        elif before is not None and isinstance(module_of(before), nn.Linear):
            sites.append(_fold(node, before, node, before))
        elif after is not None and isinstance(module_of(after), nn.Linear):
            sites.append(_fold(node, after, node, before))
    return reported(gm, "fold_bn_into_linear", sites)


def _fold(
    node: fx.Node,
    linear: fx.Node,
    norm: fx.Node,
    instead: fx.Node | None,
    rows: tuple[fx.Node, ...] = (),
) -> Site:
    layer: Any = module_of(linear)
    batch_norm: Any = module_of(norm)
    first, second = (linear, norm) if instead is linear else (norm, linear)
    what = f"{name_of(first)} + {name_of(second)}"
    reason = (
        norm_unfit(batch_norm)
        or layer_unfit(layer)
        or called_again(linear)
        or weight_read_elsewhere(linear)
    )
    if is_frozen_batch_norm(batch_norm):
        reason = "a frozen batch norm makes four dimensions of rows, and scales the second"
    others = [user for user in readers(first) if user not in (second, *rows)]
    if others:
        reason = f"the output of {name_of(first)} is also used by {name_of(others[0])}"
    folded = None
    if reason is None:
        dims = 3 if rows else 2
        folded, reason = _folded(layer, batch_norm, input_of(first), dims, first is linear)
    if folded is None or instead is None:
        return Site(name_of(node), what, False, reason or "")
    owner = node.graph.owning_module
    assert owner is not None
    note = tied_note(linear, owners_of(owner))
    if rows:
        flat, again = rows
        erase(again, linear)
        erase(norm, flat)
        erase(flat, linear)
    else:
        if first is norm:
            norm.append(linear)  # Where the norm stands: its input may be overwritten behind it.
        erase(norm, instead)
    replace_module(linear, folded)
    return Site(name_of(node), what, True, note)


def _folded(
    layer: Any, norm: Any, value: fx.Node | None, dims: int, linear_first: bool
) -> tuple[nn.Module | None, str | None]:
    scale, shift = scale_and_shift(norm)
    features = layer.out_features if linear_first else layer.in_features
    if len(scale) != features:
        return None, f"{len(scale)} features of the batch norm, {features} of the linear layer"
    rank = None if value is None else rank_of(value)
    if rank not in (None, dims):
        return None, f"its input has {rank} dimensions: the batch norm is not along the last one"
    if rank is None and (dims > 2 or not linear_first):
        return None, f"its input may have more than {dims} dimensions: the graph does not show it"
    folded = (fold_after if linear_first else fold_before)(layer, scale, shift)
    if folded is None:
        return None, f"the folded weights do not fit {layer.weight.dtype}"
    if rank is not None:
        return folded, None
    either = undoable(folded, layer, scale, shift)
    lost = "its input may have more than 2 dimensions, and for those the fold could not be undone"
    return either, None if either else lost
