"""Inputs of a few whole numbers that code counts by: sizes of images, lengths, masks of words.

Code that makes a list of such numbers, or as many parts as they say, is a graph only for these
numbers. The graph asserts them, and where a plan of it is kept, they belong to its key.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..modules.layers import assert_numbers, assert_sizes

MOST_COUNTS = 256
"""The most numbers of such an input: a call compares each."""

WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def may_count(inputs: Sequence[Any]) -> list[int]:
    """The places of the inputs that code may count by, those of few numbers first.

    >>> may_count([torch.ones(1, 3, 8, 8), torch.tensor([[8, 8], [4, 4]]), torch.tensor(2)])
    [2, 1]
    """
    found = [place for place, value in enumerate(inputs) if _is_counts(value)]
    return sorted(found, key=lambda place: inputs[place].numel())


def _is_counts(value: Any) -> bool:
    """Whether it lies where it can be read without waiting, and has a few whole numbers."""
    plain = type(value) is Tensor and value.layout is torch.strided and not value.is_nested
    return plain and value.is_cpu and value.dtype in WHOLE and 0 < value.numel() <= MOST_COUNTS


def numbers_in(value: Tensor) -> list[int]:
    """The numbers of a tensor, one behind the other; a flag is 0 or 1."""
    return (value.byte() if value.dtype is torch.bool else value).flatten().tolist()


def assert_counts(graph: fx.Graph, inputs: Sequence[Any], places: Collection[int]) -> None:
    """Let the graph check that the inputs at these places have the numbers it was made for."""
    nodes = graph.find_nodes(op="placeholder")
    with graph.inserting_before(nodes[-1].next):
        for place in places:
            numbers = numbers_in(inputs[place])
            graph.call_function(assert_numbers, (nodes[place], numbers))


def counts_of(graph: fx.Graph) -> tuple[int, ...]:
    """The places of the inputs whose numbers the graph checks."""
    checked, nodes = _checked(graph), graph.find_nodes(op="placeholder")
    return tuple(place for place, node in enumerate(nodes) if node in checked)


def counts_inputs_alone(graph: fx.Graph) -> bool:
    """Whether the graph checks the numbers of nothing but inputs, which alone make a key."""
    return all(node.op == "placeholder" for node in _checked(graph))


def with_counts(graph: fx.Graph, inputs: Sequence[Any], others: Sequence[Any]) -> tuple[Any, ...]:
    """`others` in the place of `inputs`, but for those by whose numbers the graph counts."""
    kept = counts_of(graph)
    pairs = enumerate(zip(inputs, others, strict=True))
    return tuple(own if place in kept else other for place, (own, other) in pairs)


def _checked(graph: fx.Graph) -> list[Any]:
    checks = graph.find_nodes(op="call_function", target=assert_numbers)
    return [_given(one.args[0]) for one in checks]


def _given(node: Any) -> Any:
    """The node that gives what is checked, before its sizes are."""
    while isinstance(node, fx.Node) and node.target is assert_sizes:
        node = node.args[0]
    return node
