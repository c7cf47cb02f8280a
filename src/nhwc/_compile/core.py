"""The part of a graph that is worth planning: its weights inside, its sizes numbers, no views last.

Dynamo hands weights over as inputs of the graph, in front of every call. In the core they are what
they were in the model: parameters and buffers, which passes fold and kernels pack. Sizes that vary
are inputs, too; the core is made for one call's sizes and has these as numbers.

What a graph returns may be a view: of its input, of a weight, of what else it returns. A plan
gives each answer memory of its own, so views are left to torch: the core returns what they are
views of, and the `ending` takes them. What `sides` keeps out of the core is done by the ending,
too, or by a `beginning`.

    graph   x -> conv -> relu -> flatten -> out
                          |
                          +-> transpose -> out
    core    x -> conv -> relu
    ending  relu -> flatten, transpose
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graph import targets_of, written_into
from ..graph.nodes.seen import fix_sizes
from ..models.trees import tensors_of
from ..operators.kinds import may_be_view, writes_first
from ..passes.lift_functional import lift_functional
from .behaviour import Behaviour, Unserved, is_idle
from .sides import Sides, sides_of

_SIZES = (int, float, bool, torch.Size, type(None))
"""What calls make of sizes: a run on tensors without values knows nothing else."""

_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")

_OWNER = re.compile(r"^\w+\[[^]]*\]\.?")
"""How Dynamo calls the module that hangs on a variable: `L['self'].layer1.0`."""


@dataclass(frozen=True)
class Core:
    """A model to optimize, and how it is called in the place of the graph.

    `beginning` makes some values of all inputs of the graph. The model takes the `inputs` in these
    places of the graph's inputs and those values. `ending` takes all of these and then what the
    core returns, whose tensors must lie in memory with these `strides`.
    """

    model: fx.GraphModule
    beginning: Callable[..., Any]
    inputs: tuple[int, ...]
    ending: Callable[..., Any]
    strides: tuple[tuple[int, ...], ...]

    def answer(self, model: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """What the graph returns for its `inputs`, by a `model` that answers as the core's."""
        sources = (*inputs, *self.beginning(*inputs))
        results = model(*[sources[i] for i in self.inputs])
        return self.ending(*sources, *map(_laid, results, self.strides))


def core_of(
    graph: fx.GraphModule, seen: Behaviour, given: Sequence[Any], weights: Sequence[int]
) -> Core:
    """Cut out the core for a call with what is `given`; `weights` are places in that.

    Raises Unserved where there is none: what the graph does must be left to torch.
    """
    places = graph.graph.find_nodes(op="placeholder")
    [output] = graph.graph.find_nodes(op="output")
    held = {places[i]: given[i] for i in weights}
    sides = sides_of(graph, seen, held.keys())
    views = _Views(seen, sides)
    for node in (*output.all_input_nodes, *sides.behind):
        views.trace(node)
    views.check()
    plain = {n: x for n, x in zip(places, given, strict=True) if not isinstance(x, Tensor)}
    cut = _Cut(graph, seen, sides, held, plain)
    model = cut.returning(views.roots)
    early = [node for node in graph.graph.nodes if node in sides.before]
    sources = [*places, *early]
    read = tuple(i for i, node in enumerate(sources) if node in cut.read)
    if not any(seen.is_tensor(sources[i]) for i in read):
        raise Unserved("it has no input but weights")
    strides = tuple(seen.values[root].stride() for root in views.roots)
    beginning = _computing(graph, places, early, tuple(early))
    late = [node for node in graph.graph.nodes if node in views.nodes]
    ending = _computing(graph, [*sources, *views.roots], late, output.args[0])
    return Core(model, beginning, read, ending, strides)


def _laid(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """`tensor` in memory as the graph would return it: who calls it may ask for its strides."""
    if tensor.stride() == strides:
        return tensor
    empty = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return empty.copy_(tensor)


class _Views:
    """The nodes that a graph's ending computes, and the `roots` whose results it needs for that."""

    def __init__(self, seen: Behaviour, sides: Sides) -> None:
        self._seen, self._sides = seen, sides
        self.roots: list[fx.Node] = []
        self.nodes: set[fx.Node] = set()

    def trace(self, node: fx.Node) -> None:
        """Find out what is needed for the value of `node` at the end."""
        if node in self.nodes or node in self.roots or node.op in ("placeholder", "output"):
            return
        if node in self._sides.before:
            return
        if node in self._sides.behind:
            self._add(node)
            return
        if self._is_filled_behind(node):
            self._add(node)
            return
        bases = self._bases(node)
        if self._seen.is_tensor(node) and not any(map(self._hangs, bases)):
            self.roots.append(node)
            return
        if bases and _writes(node):
            raise Unserved("what it returns lies in memory that it wrote to")
        if not bases and not self._is_plain(node):
            raise Unserved(f"it returns what {node.name} makes, which is no tensor")
        self._add(node)

    def _add(self, node: fx.Node) -> None:
        self.nodes.add(node)
        for one in node.all_input_nodes:
            self.trace(one)

    def check(self) -> None:
        """Refuse roots that a plan cannot have as they are."""
        if not self.roots:
            raise Unserved("it computes nothing")
        pairs = itertools.combinations(self.roots, 2)
        if any(self._seen.shares(one, other) for one, other in pairs):
            raise Unserved("what it returns shares memory, and not by views alone")

    def _bases(self, node: fx.Node) -> list[fx.Node]:
        return [one for one in node.all_input_nodes if self._seen.shares(node, one)]

    def _hangs(self, base: fx.Node) -> bool:
        """Whether what is taken from `base` is a view, and not a part of a tuple that was made."""
        made = base.op in ("placeholder", "get_attr") or self._seen.is_tensor(base)
        return made or bool(self._bases(base))

    def _is_filled_behind(self, node: fx.Node) -> bool:
        """Whether `node` makes memory that the ending fills: a core would return what lay there."""
        if getattr(node.target, "__name__", node.target) not in _EMPTY:
            return False
        writers = [
            writer
            for writer in self._seen.values
            if any(self._seen.shares(node, one) for one in targets_of(writer))
        ]
        return bool(writers) and self._sides.behind.issuperset(writers)

    def _is_plain(self, node: fx.Node) -> bool:
        """Whether it is a number, say, or a list of views."""
        return not tensors_of(self._seen.values.get(node))


def _writes(node: fx.Node) -> bool:
    return writes_first(node.target) or not may_be_view(node.target)


class _Cut:
    """A graph of its own under way; `read` are the nodes whose values it takes as inputs."""

    def __init__(
        self,
        graph: fx.GraphModule,
        seen: Behaviour,
        sides: Sides,
        held: dict[fx.Node, Tensor],
        plain: dict[fx.Node, Any],
    ) -> None:
        self._from, self._seen, self._sides = graph, seen, sides
        self._root, self._graph = nn.Module(), fx.Graph()
        self._values, self._held = dict(plain), held
        self.read: set[fx.Node] = set()

    def returning(self, roots: Sequence[fx.Node]) -> fx.GraphModule:
        """The module that returns `roots`."""
        needed = self._needed(roots)
        places = self._from.graph.find_nodes(op="placeholder")
        early = [node for node in self._from.graph.nodes if node in self._sides.before]
        for node in (*places, *early):
            if node in needed and node not in self._values and node not in self._held:
                self._take(node)
        for node in self._from.graph.nodes:
            if node in needed and node not in self._values:
                self._values[node] = self._made(node)
        self._graph.output(tuple(self._values[one] for one in roots))
        model = fx.GraphModule(self._root, self._graph, "Captured").eval()
        fix_sizes(model)
        # Modules have the names that the user gave them, which reports repeat.
        lift_functional(model)
        return model

    def _needed(self, roots: Sequence[fx.Node]) -> set[fx.Node]:
        """The nodes that `roots` hang on, and those that write; no input that only views read."""
        found = set(roots)
        for node in reversed(self._from.graph.nodes):
            if node in self._sides.before or node in self._sides.behind:
                continue
            if node in found or _acts(node):
                found.add(node)
                found.update(node.all_input_nodes)
        return {node for node in found if node.op != "output" and not is_idle(node)}

    def _take(self, node: fx.Node) -> None:
        """Have the value of `node` as an input, or as the number that it is."""
        value = self._seen.values[node]
        if isinstance(value, (int, float, bool)):
            self._values[node] = value
            return
        if not isinstance(value, Tensor):
            raise Unserved(f"{node.name} makes what is no tensor, before its layers")
        self.read.add(node)
        self._values[node] = self._graph.placeholder(node.name)

    def _made(self, node: fx.Node) -> Any:
        """What stands for `node`: for what does nothing its input, for numbers themselves."""
        if node in self._held:
            return self._attribute(node.name, self._held[node])
        if node.op == "get_attr":
            value = operator.attrgetter(str(node.target))(self._from)
            return self._attribute(str(node.target), value)
        if not _acts(node):
            for one in node.all_input_nodes:
                if self._seen.is_same(node, one):
                    return self._values[one]
            value = self._seen.values[node]
            if isinstance(value, _SIZES):
                return tuple(value) if isinstance(value, torch.Size) else value
        args = fx.node.map_arg(node.args, self._values.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, self._values.__getitem__)
        made = self._graph.create_node(node.op, node.target, args, kwargs, node.name)
        stack = node.meta.get("nn_module_stack") or {}
        named = {key: (_OWNER.sub("", path), kind) for key, (path, kind) in stack.items()}
        made.meta["nn_module_stack"] = {key: one for key, one in named.items() if one[0]}
        return made

    def _attribute(self, name: str, value: Any) -> fx.Node:
        name = name.replace(".", "_")
        if isinstance(value, nn.Parameter):
            self._root.register_parameter(name, value)
        else:
            self._root.register_buffer(name, value)
        return self._graph.get_attr(name)


def _acts(node: fx.Node) -> bool:
    """Whether a node does more than return something."""
    if node.op not in ("call_function", "call_method") or is_idle(node):
        return False
    return written_into(node) is not None or node.is_impure()


def _computing(
    graph: fx.GraphModule, given: Sequence[fx.Node], nodes: Sequence[fx.Node], results: Any
) -> Callable[..., Any]:
    """The function from the values of `given` that computes `nodes` and returns `results`."""
    copy = fx.Graph()
    values = {node: copy.placeholder(f"given_{node.name}") for node in given}
    for node in nodes:
        values[node] = copy.node_copy(node, values.__getitem__)
    copy.output(fx.node.map_arg(results, values.__getitem__))
    return fx.GraphModule(graph, copy).forward
