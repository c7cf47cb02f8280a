"""Samples of images, by places that anything may have computed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ...kernels.layers.sample import sample_step, weighted_samples_step
from ...kernels.programs.builder import Buffer, Builder
from ...kernels.programs.moved import Moved, as_image, as_rows, joined, settled, settled_rows
from ..implementation import Implementation
from ..specs import nodes_in
from .calls import OperatorCall
from .rows import as_it_lies


def sampled(call: OperatorCall) -> Implementation | None:
    """Our kernel for a `GridSample` of images."""
    places, shape, module = call.places(), call.out.shape, call.module
    if len(places) != 2 or len(shape) != 4:
        return None
    border = module.padding_mode == "border"
    make = partial(sample_step, border=border, corners=module.align_corners)

    def emit(builder: Builder, constants: None, *given: Moved) -> Moved:
        x, grid = (given[place] for place in places)
        y = builder.buffer(shape)
        builder.add(make, settled(builder, x), settled_rows(builder, grid), y)
        return as_image(y, shape)

    return as_it_lies(call.record, call.layer, emit)


def weighted_samples(call: OperatorCall) -> Implementation | None:
    """Our kernel for `WeightedSamples`: a row of the result for each query of each image."""
    places, nodes = call.places(), nodes_in(call.node.args)
    given = [call.record.values[node].shape for node in nodes]
    if len(call.out.shape) != 3 or len(places) < len(nodes) or len(nodes) % 2 == 0:
        return None
    n, c, queries = call.out.shape
    images = len(nodes) // 2
    sides = [shape[2:] for shape in given[:images]]
    counts = [shape[2] for shape in given[images:-1]]
    if given[-1] != (n, 1, queries, sum(counts)):
        return None
    make = partial(
        weighted_samples_step,
        images=sides,
        places=counts,
        border=call.module.padding_mode == "border",
        corners=call.module.align_corners,
    )

    def emit(builder: Builder, constants: None, *given: Moved) -> Moved:
        found = [given[place].where for place in places]
        pixels = [where.movedim(1, -1).reshape(-1, c) for where in found[:images]]
        grids = [where.reshape(n * queries, -1) for where in found[images:-1]]
        buffers = [given[place].buffer for place in places]
        x = _side_by_side(builder, buffers[:images], pixels, 0)
        grid = _side_by_side(builder, buffers[images:-1], grids, 1)
        weights = Moved(buffers[-1], found[-1].reshape(n * queries, -1))
        y = builder.buffer((n, c, queries, 1))
        builder.add(make, x, grid, settled_rows(builder, weights), y)
        rows = as_rows(y, (n, queries, c))
        return Moved(y, rows.where.movedim(-1, 1))

    return as_it_lies(call.record, call.layer, emit)


def _side_by_side(
    builder: Builder, buffers: Sequence[Buffer], where: Sequence[torch.Tensor], dim: int
) -> Buffer:
    """Parts in one buffer: at once if all lie in one, as those do that were split."""
    if all(one is buffers[0] for one in buffers):
        return settled_rows(builder, Moved(buffers[0], torch.cat(list(where), dim)))
    parts = [Moved(buffer, one) for buffer, one in zip(buffers, where, strict=True)]
    return settled_rows(builder, joined(builder, parts, dim))
