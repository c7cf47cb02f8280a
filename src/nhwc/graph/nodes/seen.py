"""The shape, type and device of what nodes return, in a graph for one set of sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from .computed import is_computed_from_arguments
from .edit import Interpreter, called, filled


class SeenTensor(NamedTuple):
    """A tensor without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def note_seen(node: fx.Node, value: object, beside: SeenTensor | None = None) -> None:
    """Note what `node` returned, if it is a tensor; it lies where `beside` does, if given."""
    if isinstance(value, Tensor):
        device = beside.device if beside else value.device
        node.meta["seen"] = SeenTensor(tuple(value.shape), value.dtype, device)


def seen_at(node: object) -> SeenTensor | None:
    """What was noted; None if nothing was."""
    return node.meta.get("seen") if isinstance(node, fx.Node) else None


def shape_at(node: object) -> tuple[int, ...] | None:
    """The shape that was noted; None if none was."""
    seen = seen_at(node)
    return seen.shape if seen else None


def note_side(node: fx.Node, like: fx.Node, side: int, size: int) -> None:
    """Note that `node` returns what `like` was noted to, but for the size of one side."""
    seen = seen_at(like)
    node.meta.pop("seen", None)
    if seen:
        shape = [*seen.shape]
        shape[side] = size
        node.meta["seen"] = seen._replace(shape=tuple(shape))


def fix_sizes(gm: fx.GraphModule) -> None:
    """Mark a graph that is called with one set of shapes alone: its sizes are numbers."""
    gm.meta["has_fixed_sizes"] = True


def note_fixed(gm: fx.GraphModule, like: object, inputs: Sequence[Any]) -> None:
    """Note what a graph of `like` returns for `inputs`, if that is called with no other shapes.

    >>> gm = fx.symbolic_trace(lambda x: x.flatten(1))
    >>> fix_sizes(gm)
    >>> note_fixed(gm, gm, [torch.ones(2, 3, 4)])
    >>> [shape_at(node) for node in gm.graph.nodes]
    [(2, 3, 4), (2, 12), (2, 12)]
    """
    if not getattr(like, "meta", {}).get("has_fixed_sizes"):
        return
    # Fake tensors refuse what hangs on values: what comes behind stays unknown.
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with torch.no_grad(), contextlib.suppress(Exception), fake:
        given = [fake.from_tensor(x) if isinstance(x, Tensor) else x for x in inputs]
        _Noting(gm).run(*given, enable_io_processing=False)


class _Noting(Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        note_seen(n, value)
        return value


def note_new(graph: fx.Graph) -> None:
    """Note what calls return that passes put between those of the trace."""
    for node in graph.nodes:
        given = [seen_at(one) for one in node.all_input_nodes]
        if seen_at(node) or not given or not all(given) or not is_computed_from_arguments(node):
            continue
        # What cannot be run stays unknown.
        with contextlib.suppress(Exception):
            note_seen(node, _run(node), given[0])


def _run(node: fx.Node) -> Any:
    """Call what `node` calls on tensors that have shapes and types, but no memory."""

    def without_memory(one: fx.Node) -> Tensor:
        seen = seen_at(one)
        assert seen is not None
        return torch.empty(seen.shape, dtype=seen.dtype, device="meta")

    args, kwargs = filled((node.args, node.kwargs), without_memory)
    return called(node, args, kwargs)
