"""`grid_sample` of images, by places that anything may have computed."""

from __future__ import annotations

from functools import partial

from ...kernels.layers.sample import sample_step
from ...kernels.programs.builder import Builder
from ...kernels.programs.moved import Moved, as_image, settled, settled_rows
from ..implementation import Implementation
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
