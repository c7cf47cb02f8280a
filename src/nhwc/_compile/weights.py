"""Weights that come with every call, known again, and kept alive by nobody here.

Dynamo gives one graph to all modules that run the same code, and says nothing when a weight is
written to or replaced. So each call shows which weights it came with, and whether they are as they
were when kernels packed them.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor, fx, nn

from ..optimized.stamp import Facts, has_place


def weights_of(graph: fx.GraphModule, examples: Sequence[Any]) -> tuple[int, ...]:
    """The places of parameters and buffers of modules among the inputs of a graph of Dynamo's.

    Other tensors that hang on modules may be new ones in each call: they are inputs.
    """
    places = graph.graph.find_nodes(op="placeholder")
    given = enumerate(zip(places, examples, strict=True))
    return tuple(i for i, (node, example) in given if _is_weight(node, example))


def _is_weight(node: fx.Node, example: Any) -> bool:
    if not isinstance(example, Tensor):
        return False
    source = getattr(node, "_dynamo_source", None)
    is_buffer = source is not None and "._buffers[" in source.name
    return is_buffer or isinstance(example, nn.Parameter)


class Weights:
    """One set of weights, and what was made of it, by the shapes that go with it.

    `waits` calls run the graph before anything is made: what changes with every call, as weights do
    while a model is trained, is not worth packing. Each change doubles the patience with the next.
    """

    def __init__(self, tensors: Sequence[Tensor], waits: int) -> None:
        self._patience = 1
        self.waits = waits
        self._note(tensors)

    def _note(self, tensors: Sequence[Tensor]) -> None:
        made: dict[Hashable, Any] = {}
        # `swap_tensors` refuses a tensor that has weak references, not one whose storage has them.
        held = [one.untyped_storage() if has_place(one) else one for one in tensors]
        self._held = [weakref.ref(one, lambda _: made.clear()) for one in held]
        self._facts, self.made = Facts(tensors), made

    def are_alive(self) -> bool:
        return None not in [one() for one in self._held]

    def are_ready(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a plan may serve this call; forgets what was made of other numbers."""
        if not (self.are_alive() and self._facts.hold(tensors)):
            self._note(tensors)
            self.waits, self._patience = self._patience, 2 * self._patience
        if self.waits:
            self.waits -= 1
            return False
        return True
