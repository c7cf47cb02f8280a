"""Layers in terms of our own kernels: what to add to a program's builder for each.

Importing this loads the kernels' compiler; `natives` in `candidates` does so when it is needed.
"""

from __future__ import annotations

import torch
from torch import fx

from ...formats import Format
from ..recording import Record, Seen
from ..specs import Layer, Weighted
from .kernel import Native
from .operators import Operators
from .weighted import weighted


def natives_of(graph: fx.GraphModule, record: Record, layer: Layer) -> tuple[Native, ...]:
    """Our kernels that can compute `layer`; none where they do not know it."""
    if not _fits(record, layer):
        return ()
    if isinstance(layer.spec, Weighted):
        return weighted(layer.spec, record.values[layer.node].shape)
    operators = Operators(graph, record, layer)
    emit = operators.emit()
    return (Native("nhwc", True, emit, operators.free),) if emit else ()


def _fits(record: Record, layer: Layer) -> bool:
    """Whether all that goes in and out is float32 on the CPU, as images or as rows of channels.

    Of rows in batches, (N, L, C), operators take those that lie in this order: others give results
    that lie otherwise, too, and what comes after may ask for strides.
    """
    weighted = isinstance(layer.spec, Weighted)
    values = [record.values.get(node) for node in (*layer.inputs, layer.node)]
    flat = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
    return all(
        isinstance(seen, Seen)
        and seen.dtype is torch.float32
        and seen.device == "cpu"
        and len(seen.shape) in (2, 3, 4)
        and (weighted or len(seen.shape) != 3 or seen.layout is Format.CONTIGUOUS)
        and 0 not in seen.shape
        for seen in flat
    )
