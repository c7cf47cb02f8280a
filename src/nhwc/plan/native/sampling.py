"""Samples of images, by places that anything may have computed."""

from __future__ import annotations

from functools import partial

from ...kernels.layers.sample import sample_step, weighted_samples_step
from ...kernels.programs.builder import Builder
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
        found = [given[place] for place in places]
        pixels = [Moved(x.buffer, x.where.movedim(1, -1).reshape(-1, c)) for x in found[:images]]
        rows = [Moved(one.buffer, one.where.reshape(n * queries, -1)) for one in found[images:]]
        x = settled_rows(builder, joined(builder, pixels, 0))
        grid = settled_rows(builder, joined(builder, rows[:-1], 1))
        y = builder.buffer((n, c, queries, 1))
        builder.add(make, x, grid, settled_rows(builder, rows[-1]), y)
        return Moved(y, as_rows(y, (n, queries, c)).where.movedim(-1, 1))

    return as_it_lies(call.record, call.layer, emit)
