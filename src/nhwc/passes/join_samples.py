"""Join the samples of deformable attention, and the sum of them by weights, into one layer.

found = [F.grid_sample(x, places) for x, places in ...]
y = (torch.cat(found, -1) * weights).sum(-1)            ->      y = WeightedSamples(...)

Or they are stacked, and the two last dimensions made one. No sample is kept then: a detector has
millions of them, and each is read once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx

from ..graph import add_module, bound, erase_unused
from ..graph.modules.mended import WeightedSamples
from ..graph.nodes.seen import note_new, shape_at
from ..graph.report import PassReport, Site
from ._folding_sites import name_of, written_between
from ._matching import Sampling, arithmetic, is_own, sampling_of
from ._reporting import reported

_CATS = (torch.cat, torch.concat, torch.concatenate)
_RESHAPES = ("flatten", "reshape", "view", torch.flatten, torch.reshape)


class _Sum(NamedTuple):
    """The calls of `grid_sample`, what each asks for, and the weights of all places."""

    calls: list[fx.Node]
    samplings: list[Sampling]
    weights: fx.Node


def join_samples(gm: fx.GraphModule) -> PassReport:
    """Make one layer of each sum of weighted samples."""
    if not any(node.target is F.grid_sample for node in gm.graph.nodes):
        return reported(gm, "join_samples", [])
    note_new(gm.graph)
    sites = []
    for node in list(gm.graph.nodes):
        found = _summed(node)
        if found is None:
            continue
        read = [one for s in found.samplings for one in (s.image, s.grid)]
        reason = written_between([*read, found.weights], min(found.calls), node)
        sites.append(Site(name_of(node), "weighted samples", not reason, reason))
        if not reason:
            _replace(gm, node, found)
    return reported(gm, "join_samples", sites)


def _summed(node: fx.Node) -> _Sum | None:
    """What `node` sums over its last dimension, if that is weighted samples alone."""
    if node.target not in ("sum", torch.sum):
        return None
    given = bound(node, ("input", "dim", "keepdim"))
    product, dim = given["input"], given.get("dim")
    if given.keys() != {"input", "dim"} or not is_own(product) or not _is_last(dim, product):
        return None
    if arithmetic(product) != "mul" or len(product.args) != 2:
        return None
    for value, weights in (product.args, product.args[::-1]):
        calls = _samples(value) if is_own(value) else []
        samplings = [sampling_of(one) for one in calls]
        known = [one for one in samplings if isinstance(one, Sampling)]
        alike = len({(one.padding_mode, one.align_corners) for one in known}) == 1
        if alike and len(known) == len(calls) and _is_for_each_place(weights, value):
            return _Sum(calls, known, weights)
    return None


def _samples(node: fx.Node) -> list[fx.Node]:
    """The samples that `node` has side by side in its last dimension; none if it is another."""
    parts = [node]
    if node.target in _CATS:
        parts = _parts(node, -1)
    elif node.target in _RESHAPES:
        stack: Any = node.args[0]
        joins = is_own(stack) and stack.target is torch.stack and _joins_last(node, stack)
        parts = _parts(stack, -2) if joins else []
    each = all(is_own(one) and one.target is F.grid_sample for one in parts)
    return parts if each else []


def _joins_last(node: fx.Node, source: fx.Node) -> bool:
    """Whether `node` makes one dimension of the last two of `source`."""
    if node.target in ("flatten", torch.flatten):
        given = bound(node, ("input", "start_dim", "end_dim"))
        return given.get("start_dim") == -2 and given.get("end_dim", -1) == -1
    made, shape = shape_at(node), shape_at(source)
    return shape is not None and made == (*shape[:-2], shape[-2] * shape[-1])


def _parts(node: fx.Node, place: int) -> list[fx.Node]:
    """What `node` puts together along a dimension of its result, counted from the end."""
    given = bound(node, ("tensors", "dim"))
    parts: Any = given.get("tensors")
    dim = given.get("dim", given.get("axis", 0))
    known = isinstance(parts, list | tuple) and given.keys() <= {"tensors", "dim", "axis"}
    return list(parts) if known and _is_dim(dim, node, place) else []


def _is_last(dim: Any, node: fx.Node) -> bool:
    return _is_dim(dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim, node, -1)


def _is_dim(dim: Any, node: fx.Node, place: int) -> bool:
    """Whether `dim` is the dimension of a value that is so counted from its end."""
    shape = shape_at(node)
    return type(dim) is int and (dim == place or (shape is not None and dim == len(shape) + place))


def _is_for_each_place(weights: Any, samples: fx.Node) -> bool:
    """Whether there is a weight for each place of each query, as far as shapes are known."""
    if not isinstance(weights, fx.Node):
        return False
    shape, sampled = shape_at(weights), shape_at(samples)
    return shape is None or sampled is None or shape == (sampled[0], 1, *sampled[2:])


def _replace(gm: fx.GraphModule, node: fx.Node, found: _Sum) -> None:
    first = found.samplings[0]
    layer = WeightedSamples(first.padding_mode, first.align_corners)
    images, grids = ([getattr(s, name) for s in found.samplings] for name in ("image", "grid"))
    with gm.graph.inserting_before(node):
        joined = add_module(gm.graph, "weighted_samples", layer, (images, grids, found.weights))
    joined.meta = dict(node.meta)
    node.replace_all_uses_with(joined)
    erase_unused(node)
