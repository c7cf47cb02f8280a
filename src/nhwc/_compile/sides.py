"""Which nodes of a graph come before the part that is planned, and which behind it.

A plan gives every value a layout and memory of its own, so a write that others see is not for it;
nor is what sorts, drops and counts by values, where the last digit decides. In most models such
code stands before the first layer (images are copied into a batch) or behind the last (boxes are
decoded and sorted), and torch runs it there as it was captured.

    x -> copy_ -> | conv -> relu -> conv | -> topk -> gather -> out
        before    |         core         |         behind
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from ..graph import follow_writes, targets_of
from ..models.trees import tensors_of
from ..passes.mend_writes import assign_anew, write_anew
from ..plan.scene import why_seen
from .behaviour import Behaviour, Unserved, behaviour, is_idle


def with_fewer_writes(
    graph: fx.GraphModule, inputs: Sequence[Any]
) -> tuple[fx.GraphModule, Behaviour]:
    """`graph` without the writes in its midst that can be said as new values, and what it does.

    It has them still if what it returns for `inputs` would lie otherwise in memory without them.
    """
    seen = behaviour(graph, inputs)
    if not any(map(targets_of, graph.graph.nodes)):
        return graph, seen
    own = _copy_with_fewer_writes(graph)
    less = behaviour(own, inputs)
    same = _strides_of_results(own, less) == _strides_of_results(graph, seen)
    return (own, less) if same else (graph, seen)


def _strides_of_results(graph: fx.GraphModule, seen: Behaviour) -> list[tuple[int, ...]]:
    [output] = graph.graph.find_nodes(op="output")
    return [x.stride() for node in output.all_input_nodes for x in tensors_of(seen.values[node])]


def _copy_with_fewer_writes(graph: fx.GraphModule) -> fx.GraphModule:
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph.graph, {}))  # type: ignore[arg-type]
    own = fx.GraphModule(graph, copied)
    follow_writes(own)
    assign_anew(own)
    write_anew(own)
    own.recompile()
    return own


@dataclass(frozen=True)
class Sides:
    """The nodes `before` and `behind` the core; both in the order of the graph."""

    before: frozenset[fx.Node]
    behind: frozenset[fx.Node]


def sides_of(graph: fx.GraphModule, seen: Behaviour, weights: Set[fx.Node]) -> Sides:
    """Find a side for every write that others see, and for what decides by values.

    Raises Unserved for a write in the midst of the layers.
    """
    found = _Finder(graph, seen, weights)
    for node in graph.graph.nodes:
        if node not in found.before and node not in found.behind and not is_idle(node):
            seen_in = [one for one in targets_of(node) if why_seen(node, one) is not None]
            if seen_in:
                found.place_write(node, seen_in)
    for node in graph.graph.nodes:
        if node not in found.before and node not in found.behind and found.decides(node):
            found.place_decision(node)
    return Sides(frozenset(found.before), frozenset(found.behind))


class _Finder:
    def __init__(self, graph: fx.GraphModule, seen: Behaviour, weights: Set[fx.Node]) -> None:
        self._nodes, self._seen, self._weights = list(graph.graph.nodes), seen, weights
        self._order = {node: number for number, node in enumerate(self._nodes)}
        self.before: set[fx.Node] = set()
        self.behind: set[fx.Node] = set()

    def place_write(self, write: fx.Node, targets: Sequence[fx.Node]) -> None:
        """Put `write` on a side, with all that must see the memory of `targets` as it was then."""
        number = self._order[write]
        earlier = {n for n in self._nodes[:number] if self._touches(n, targets)}
        above = self._above({write, *earlier})
        if not self._has_layer(above) and self.behind.isdisjoint(above):
            self.before |= above
            return
        later = {n for n in self._nodes[number:] if self._touches(n, targets)}
        below = self._below({write, *later})
        if self._has_layer(below):
            raise Unserved(f"{write.name} writes into {targets[0].name} between its layers")
        self.behind |= below

    def place_decision(self, node: fx.Node) -> None:
        """Put `node` behind the core, where all that hangs on it can go, too."""
        below = self._below({node})
        if not self._has_layer(below):
            self.behind |= below

    def decides(self, node: fx.Node) -> bool:
        """Whether it makes integers or booleans of floating-point numbers."""
        made = tensors_of(self._seen.values.get(node))
        read = [self._seen.values.get(one) for one in node.all_input_nodes]
        floating = [x for x in read if isinstance(x, Tensor) and x.is_floating_point()]
        return bool(floating) and any(not x.is_floating_point() for x in made)

    def _touches(self, node: fx.Node, targets: Sequence[fx.Node]) -> bool:
        if node.op in ("placeholder", "get_attr", "output"):
            return False
        nodes = (node, *node.all_input_nodes)
        return any(self._seen.shares(one, target) for one in nodes for target in targets)

    def _has_layer(self, nodes: Set[fx.Node]) -> bool:
        return any(self._is_matrix(one) for node in nodes for one in node.all_input_nodes)

    def _is_matrix(self, node: fx.Node) -> bool:
        value: Any = self._seen.values.get(node)
        return node in self._weights and value.ndim > 1

    def _above(self, nodes: Set[fx.Node]) -> set[fx.Node]:
        found = set(nodes)
        for node in reversed(self._nodes):
            if node in found:
                found.update(one for one in node.all_input_nodes if one.op != "placeholder")
        return found

    def _below(self, nodes: Set[fx.Node]) -> set[fx.Node]:
        found = set(nodes)
        for node in self._nodes:
            if not found.isdisjoint(node.all_input_nodes):
                found.add(node)
        return {node for node in found if node.op != "output"}
