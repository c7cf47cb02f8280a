"""Numbers of Python that Dynamo wraps into tensors, to take them out again in the graph.

With `dynamic=True` that is every float that hangs on a module, the eps of a batch norm, say. A plan
is for the number that it was made with, as it is for sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx


@dataclass(frozen=True)
class Unwrapped:
    """A graph that takes numbers in some `places`, where that of Dynamo's takes tensors."""

    graph: fx.GraphModule
    places: tuple[int, ...]

    def given(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs of this graph in the place of those of Dynamo's."""
        found = list(inputs)
        for place in self.places:
            found[place] = found[place].item()
        return found


def unwrapped(graph: fx.GraphModule) -> Unwrapped:
    """`graph` with numbers for the inputs that it only takes a number out of.

    >>> graph = fx.symbolic_trace(lambda x, eps: x + eps.item())
    >>> found = unwrapped(graph)
    >>> found.places, found.graph(1, 2)
    ((1,), 3)
    """
    copied, values = fx.Graph(), dict[fx.Node, fx.Node]()
    result: Any = copied.graph_copy(graph.graph, values, return_output_node=True)
    copied.output(result[0])
    places = []
    for place, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        items = [user for user in node.users if user.op == "call_method" and user.target == "item"]
        if items and len(items) == len(node.users):
            places.append(place)
            for item in items:
                values[item].replace_all_uses_with(values[node])
                copied.erase_node(values[item])
    return Unwrapped(fx.GraphModule(graph, copied) if places else graph, tuple(places))
