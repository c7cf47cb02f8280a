"""Results in the layout in which the model returns them.

A pass that mends an operator keeps channels last where torch loses it. Inside of a model nobody
sees that; who takes the result may call `view` on it, which the strides decide.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from ..formats import CHANNELS_LAST_OF, MEMORY_FORMATS, Format
from ..graph import clean
from ..graph.nodes.results import opened, return_instead
from ..models.preserve import preserved
from ..models.trees import flatten
from ..plan.recording import layout_of
from ..verify import answer


def return_as(graph: fx.GraphModule, example: tuple[Any, ...], wanted: dict[str, Any]) -> None:
    """Convert what `graph` returns of `example` in another layout than `wanted`, in place."""
    layouts = {path: layout for path, value in wanted.items() if (layout := _layout(value))}
    if not layouts:
        return
    # Around the run alone: what is put back behind it must not be the code of the old graph.
    with preserved(graph):
        found = answer(graph, example)
    result = graph.graph.output_node()
    changed = False
    for path, node in flatten(opened(result.args[0])):
        layout = layouts.get(path)
        if not isinstance(node, fx.Node) or layout in (None, _layout(found.get(path))):
            continue
        asked = CHANNELS_LAST_OF[found[path].ndim] if layout.is_last else Format.CONTIGUOUS
        memory = MEMORY_FORMATS[asked]
        # Not behind what the graph puts back into an input, which is its end.
        with graph.graph.inserting_after(node):
            converted = graph.graph.call_method("contiguous", (node,), {"memory_format": memory})
        return_instead(node, converted)
        changed = True
    if changed:
        clean(graph)


def _layout(value: Any) -> Format | None:
    """The layout of a dense image or volume; None for anything else."""
    dense = isinstance(value, Tensor) and value.ndim in CHANNELS_LAST_OF
    return layout_of(value) if dense and value.layout is torch.strided else None
