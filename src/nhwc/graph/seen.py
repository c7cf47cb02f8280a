"""The shape, type and device of what nodes returned in a trace for one set of sizes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from .edit import filled


class SeenTensor(NamedTuple):
    """A tensor without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def note_seen(node: fx.Node, value: object) -> None:
    """Note what `node` returned, if it is a tensor."""
    if isinstance(value, Tensor):
        node.meta["seen"] = SeenTensor(tuple(value.shape), value.dtype, value.device)


def seen_at(node: object) -> SeenTensor | None:
    """What was noted; None if nothing was."""
    return node.meta.get("seen") if isinstance(node, fx.Node) else None


def shape_at(node: object) -> tuple[int, ...] | None:
    """The shape that was noted; None if none was."""
    seen = seen_at(node)
    return seen.shape if seen else None


def note_new(graph: fx.Graph) -> None:
    """Note what calls return that passes put between those of the trace."""
    for node in graph.nodes:
        given = node.all_input_nodes
        called = node.op in ("call_function", "call_method")
        if called and given and not seen_at(node) and all(map(seen_at, given)):
            try:
                value = _run(node)
            except Exception:
                continue  # What it returns stays unknown.
            if isinstance(value, Tensor):
                device = given[0].meta["seen"].device
                node.meta["seen"] = SeenTensor(tuple(value.shape), value.dtype, device)


def _run(node: fx.Node) -> Any:
    """Call what `node` calls on tensors that have shapes and types, but no memory."""

    def without_memory(one: fx.Node) -> Tensor:
        seen = seen_at(one)
        assert seen is not None
        return torch.empty(seen.shape, dtype=seen.dtype, device="meta")

    args, kwargs = filled((node.args, node.kwargs), without_memory)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)
