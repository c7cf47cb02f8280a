"""What a graph writes while it is traced, and the tensors that it takes as they are now."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from ..nodes.memory import OF_OWN, memory_of
from ..nodes.names import is_constant

_WRITES_INTO_OWN = "it writes a traced value into a tensor that it made"


class Written:
    """The writes of a graph, and the tensors that stand in it as they were when it took them."""

    def __init__(self) -> None:
        self._taken: dict[fx.Node, tuple[Tensor, int]] = {}
        self._writes: list[tuple[fx.Node, fx.Node]] = []

    def take(self, node: fx.Node, tensor: Tensor) -> None:
        """Note that `node` stands for `tensor` as it is now."""
        self._taken[node] = tensor, tensor._version

    def note(self, node: fx.Node, written: Any) -> None:
        """Note the values that `node` writes into; refuse those that a graph has copies of."""
        targets = [one for one in tree_leaves(written) if isinstance(one, fx.Node)]
        self._writes += [(node, one) for one in targets]
        if any(map(is_constant, targets)):
            raise fx.proxy.TraceError(_WRITES_INTO_OWN)
        if any(one.meta.get(OF_OWN) for one in memory_of(*targets)):
            raise fx.proxy.TraceError("it writes into a part of a tensor that it keeps")

    def writes_into(self, path: str) -> bool:
        """Whether the graph so far writes into the buffer at `path`."""
        return any(one.target == path for _, one in self._writes if not one._erased)

    def check(self, named: Iterable[Tensor]) -> None:
        """Refuse code that writes into a tensor after the graph has taken it as a constant.

        `named` are the weights and buffers of the model.
        """
        for node, (tensor, version) in self._taken.items():
            if not node._erased and tensor._version != version:
                raise fx.proxy.TraceError("it writes into a tensor that it used before")
        # Each run writes into a copy of a constant, which no other tensor in its memory shows.
        made = [node for node in self._taken if is_constant(node) and not node._erased]
        if not made:
            return
        written = memory_of(*(one for node, one in self._writes if not node._erased))
        held = [*named, *(tensor for tensor, _ in self._taken.values())]
        for node in written.intersection(made):
            tensor, _ = self._taken[node]
            if any(one is not tensor and _is_alias_of(one, tensor) for one in held):
                raise fx.proxy.TraceError(_WRITES_INTO_OWN)


def _is_alias_of(one: Tensor, other: Tensor) -> bool:
    return torch._C._is_alias_of(one, other)  # type: ignore[attr-defined,no-any-return]
