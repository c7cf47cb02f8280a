"""Our kernels for a layer, each with the steps that it adds to a program's builder.

Importing this loads the kernels' compiler; `scene` does so where there is one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...formats import Format
from ...graph.nodes.results import is_returned
from ...operators.kinds import arithmetic_of
from ..implementation import Implementation
from ..recording import Record, Seen
from ..specs import Layer, OperatorSpec, Weighted
from .arithmetic import CHOICES
from .calls import kernels_in
from .operators import operator
from .pairs import joints_of as joints_of
from .tokens import tokens
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
        found = _of_operator(graph, record, layer)
    image = record.image(layer.inputs[0]) if found else None
    if image is None or image.shape[1] > 4:
        return found
    # Images come contiguous: the first layer may convert them on the way.
    plain = Format.CONTIGUOUS
    return tuple(one for ours in found for one in (ours, replace(ours, reads=plain)))


def _of_operator(graph: fx.GraphModule, record: Record, layer: Layer) -> tuple[Implementation, ...]:
    """Our kernel for an operator on images, on tokens, or on either."""
    if not _on_images(record, layer):
        return kernels_in(tokens(graph, record, layer)) or _known(graph, record, layer)
    # What no kernel for images knows may be one for rows: products of images that are heads, say.
    return _known(graph, record, layer) or kernels_in(tokens(graph, record, layer))


def _on_images(record: Record, layer: Layer) -> bool:
    """Whether all that an operator reads and makes are images, volumes or rows."""
    whole = record.values.get(layer.node)
    values = [one for one in layer.inputs if not _is_of_channels(record.values.get(one), whole)]
    few = all(len(one.shape) in (2, 4, 5) for one in _seen(record, (*values, layer.node)))
    nodes = [layer.node, *(one for one in values if one.op != "get_attr")]
    return few and record.tokens.isdisjoint(nodes)


def _is_of_channels(value: Any, whole: Any) -> bool:
    """Whether `value` is a number for each channel of the images or volumes in `whole`: C, 1, 1."""
    if not isinstance(value, Seen) or not isinstance(whole, Seen) or len(whole.shape) not in (4, 5):
        return False
    return value.shape == (whole.shape[1], *(1,) * (len(whole.shape) - 2))


def _known(graph: fx.GraphModule, record: Record, layer: Layer) -> tuple[Implementation, ...]:
    """Our kernel for an operator on images; of rows in batches it knows contiguous ones."""
    known = all(
        len(one.shape) in (2, 4, 5) or (len(one.shape) == 3 and one.layout is Format.CONTIGUOUS)
        for one in _seen(record, (*layer.inputs, layer.node))
    )
    return operator(graph, record, layer) if known else ()


def _fits(record: Record, layer: Layer) -> bool:
    """Whether all inputs and outputs are float32 on the CPU.

    What the model returns has the strides that torch gives it: we know those of images, those of
    contiguous tensors, and those that a copy brings about.
    """
    result, spec = record.values.get(layer.node), layer.spec
    strided = isinstance(result, Seen) and result.layout is not Format.CONTIGUOUS
    known = not strided or len(result.shape) in (1, 2, 4, 5) or layer.node in record.strides  # type: ignore[union-attr]
    if not known and is_returned(layer.node):
        return False
    # Arithmetic may be given a tensor without dimensions, as a choice may.
    name = spec.name if isinstance(spec, OperatorSpec) else ""
    arithmetic = arithmetic_of(name) is not None or name in ("compared", *CHOICES)
    read, made = (_seen(record, nodes) for nodes in (layer.inputs, (layer.node,)))
    return all(
        isinstance(one, Seen)
        and one.dtype is torch.float32
        and one.device == "cpu"
        and 0 not in one.shape
        for one in (*read, *made)
    ) and all(one.shape for one in (*made, *(() if arithmetic else read)))


def _seen(record: Record, nodes: Iterable[fx.Node]) -> list[Any]:
    values = [record.values.get(node) for node in nodes]
    return [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
