"""Our kernels for a layer, each with the steps that it adds to a program's builder.

Importing this loads the kernels' compiler; `scene` does so where there is one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from ...formats import Format
from ..implementation import Implementation
from ..recording import Record, Seen
from ..specs import Layer, Weighted
from .operators import operator
from .pairs import joints_of as joints_of
from .weighted import weighted


def kernels_of_ours(
    graph: fx.GraphModule, record: Record, layer: Layer
) -> tuple[Implementation, ...]:
    """Our kernels that can compute `layer`; none where they do not know it."""
    if not _fits(record, layer):
        return ()
    if isinstance(layer.spec, Weighted):
        found = weighted(layer.spec)
    else:
        found = operator(graph, record, layer)
    image = record.image(layer.inputs[0]) if found else None
    if image is None or image.shape[1] > 4:
        return found
    # Images come contiguous: the first layer may convert them on the way.
    plain = Format.CONTIGUOUS
    return tuple(one for ours in found for one in (ours, replace(ours, reads=plain)))


def _fits(record: Record, layer: Layer) -> bool:
    """Whether all inputs and outputs are float32 on the CPU: images, volumes or rows of channels.

    Operators take rows in batches, (N, L, C), only if they are contiguous: from others torch makes
    results with other strides, which later operators may ask for.
    """
    weighted = isinstance(layer.spec, Weighted)
    values = [record.values.get(node) for node in (*layer.inputs, layer.node)]
    flat = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
    return all(
        isinstance(seen, Seen)
        and seen.dtype is torch.float32
        and seen.device == "cpu"
        and len(seen.shape) in (2, 3, 4, 5)
        and (weighted or len(seen.shape) != 3 or seen.layout is Format.CONTIGUOUS)
        and 0 not in seen.shape
        for seen in flat
    )
