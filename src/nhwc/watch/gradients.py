"""Record a backward pass that somebody else starts: a hook on each node of its graph.

A mode would have to be left again where the caller's code may raise. Hooks go with the graph.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from ..formats import Format
from ..models.trees import storage_of
from .calls import Call, TensorSpec
from .effects import MIXING
from .recorder import Recorder

_LEAF = "AccumulateGrad"


@dataclass(frozen=True)
class _Node:
    """A node by its number; the node itself, held by its own hook, would never be freed."""

    number: int
    operator: str
    sequence: int
    targets: tuple[tuple[int, int] | None, ...]
    """For each gradient that it makes, the node that takes it and the place; None for leaves."""


class Gradients:
    """The calls of the backward pass behind some tensors, as `recorder` would have seen them.

    Each is charged to the line that made its node, if that was recorded.
    """

    def __init__(self, recorder: Recorder, results: Sequence[Tensor]) -> None:
        self._recorder = recorder
        self._makers: dict[tuple[int, int], int] = {}
        nodes: dict[Any, int] = {}
        waiting = [result.grad_fn for result in results if result.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            if node not in nodes and not node.name().endswith(_LEAF):
                nodes[node] = len(nodes)
                waiting += [taker for taker, _ in node.next_functions if taker is not None]
        self.handles = [node.register_hook(self._hook(node, nodes)) for node in nodes]

    def _hook(self, node: Any, nodes: dict[Any, int]) -> Any:
        targets = tuple(
            (nodes[taker], place) if taker in nodes else None
            for taker, place in node.next_functions
        )
        plan = _Node(nodes[node], _operator(node.name()), node._sequence_nr(), targets)
        return partial(self._ran, plan)

    def _ran(
        self, node: _Node, made: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]
    ) -> None:
        recorder = self._recorder
        index = recorder.made
        recorder.made += 1
        specs = [
            recorder.spec(tensor, self._makers.get((node.number, place), -1))
            for place, tensor in enumerate(given)
            if isinstance(tensor, Tensor)
        ]
        before = {storage_of(tensor) for tensor in given if isinstance(tensor, Tensor)}
        outputs: list[TensorSpec] = []
        fresh = False
        for tensor, target in zip(made, node.targets, strict=False):
            if isinstance(tensor, Tensor) and target is not None:
                self._makers[target] = index
                outputs.append(recorder.spec(tensor, index))
                fresh |= storage_of(tensor) not in before
        recorder.on_call(
            Call(
                index=index,
                operator=node.operator,
                backward=True,
                site=recorder.site_of(node.sequence),
                # What is spread over an image from one pixel had no format to keep.
                inputs=tuple(one for one in specs if one.format is not Format.AMBIGUOUS),
                outputs=tuple(outputs),
                moves_data=fresh,
            )
        )


def _operator(name: str) -> str:
    """The name of a node, as torch names the operator that it runs.

    >>> _operator("UpsampleNearest2DBackward0"), _operator("BmmBackward0")
    ('autograd::upsample_nearest2d_backward', 'autograd::bmm')
    """
    plain = re.sub(r"Backward\d*$", "", name)
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])|(?<=[a-z])(?=[A-Z])", "_", plain).lower()
    return f"autograd::{snake}" + ("" if snake in MIXING else "_backward")
