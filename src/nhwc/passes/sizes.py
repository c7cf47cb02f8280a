"""A graph for one set of input shapes, where it opens parts or lets the passes do more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..graph.modules.layers import Spread
from ..graph.nodes.shapes import is_size
from ..graph.report import Opaque, PassReport
from ..graph.tracing.explained import explain
from ..graph.tracing.sized import capture_sized, closed_functions
from . import Pass
from .split_attention import attention_of_unknown_sizes


@dataclass(frozen=True)
class Sized:
    """A graph for one set of shapes, the parts that it opened, and what the passes did in them.

    `unset` are attributes that the model sets in a call and the graph does not: no call reads them.
    It shares all modules and tensors that no pass replaced with the graph for all shapes.
    """

    graph: fx.GraphModule
    opened: tuple[Opaque, ...]
    passes: tuple[PassReport, ...]
    unset: tuple[str, ...] = ()


def for_sizes(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    opaque: Sequence[Opaque],
    passes: Sequence[Pass],
) -> tuple[Sized | None, str]:
    """`graph` for inputs of these shapes alone; None if that opens none of its `opaque` parts, and
    the passes find nothing more in it. Also why a model that is opaque as a whole stays so.

    Functions that `torch.fx.wrap` keeps closed are such parts, too, and attention with masks.
    """
    closed_calls = closed_functions(graph.graph) + attention_of_unknown_sizes(graph)
    if not opaque and not closed_calls and not any(map(is_size, graph.graph.nodes)):
        return None, ""
    try:
        sized, closed = capture_sized(graph, inputs)
    except Exception as error:
        return None, explain(error)
    around = _path_of_whole(graph) if any(not part.path for part in opaque) else ""
    shut = [path.removeprefix(around).lstrip(".") for path in closed]
    opened = tuple(part for part in opaque if not any(_within(part.path, path) for path in shut))
    opened += closed_calls
    if opaque and not opened:
        return None, sized.meta["stopped"] or closed.get(around, "")
    reports = tuple(rewrite(sized) for rewrite in passes)
    if not opened and not any(report.applied for report in reports):
        return None, ""
    for parameter in sized.parameters():
        parameter.requires_grad_(False)
    unset = tuple(name.removeprefix(around).lstrip(".") for name in sized.meta["unset"])
    return Sized(sized, opened, reports, unset), ""


def _path_of_whole(graph: fx.GraphModule) -> str:
    """The path at which `graph` calls a model that is opaque as a whole."""
    return "model.module" if isinstance(graph.model, Spread) else "model"


def _within(path: str, other: str) -> bool:
    return not other or path == other or path.startswith(f"{other}.")
