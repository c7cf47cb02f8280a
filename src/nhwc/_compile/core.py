"""The part of a graph that is worth planning: its weights inside, its sizes numbers, no views last.

Dynamo hands weights over as inputs of the graph, in front of every call. In the core they are what
they were in the model: parameters and buffers, which passes fold and kernels pack. Sizes that vary
are inputs, too; the core is made for one call's sizes and has these as numbers.

What a graph returns may be a view: of its input, of a weight, of what else it returns. A plan gives
each answer memory of its own, so views are left to torch: the core returns what they are views of,
and the `ending` takes them.

    graph   x -> conv -> relu -> flatten -> out        core     x -> conv -> relu
              \\-> transpose -> out                     ending   x, relu -> transpose, flatten
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..models.trees import tensors_of
from ..operators.kinds import may_be_view, writes_first
from .behaviour import Behaviour, Unserved, behaviour, is_idle

_HOMES = ("_operator", "builtins", "math")


@dataclass(frozen=True)
class Core:
    """A model to optimize, which takes the `inputs` in these places of the graph's.

    `ending` takes all inputs of the graph and then what the core returns, whose tensors must lie in
    memory with these `strides`.
    """

    model: fx.GraphModule
    inputs: tuple[int, ...]
    ending: Callable[..., Any]
    strides: tuple[tuple[int, ...], ...]


def core_of(graph: fx.GraphModule, given: Sequence[Any], weights: Sequence[int], name: str) -> Core:
    """Cut out the core for a call with what is `given`; `weights` are places in that.

    Raises Unserved where there is none: what the graph does must be left to torch.
    """
    seen = behaviour(graph, given)
    places = graph.graph.find_nodes(op="placeholder")
    [output] = graph.graph.find_nodes(op="output")
    if not isinstance(output.args[0], (tuple, list)):
        raise Unserved("it returns no tuple")
    views = _Views(seen)
    for node in output.all_input_nodes:
        views.trace(node)
    views.check()
    held = {places[i]: given[i] for i in weights}
    plain = {n: x for n, x in zip(places, given, strict=True) if not isinstance(x, Tensor)}
    model = _cut(graph, views.roots, held, plain, name)
    names = {str(node.target) for node in model.graph.find_nodes(op="placeholder")}
    read = [i for i, node in enumerate(places) if node.name in names]
    if not tensors_of([given[i] for i in read]):
        raise Unserved("it has no input but weights")
    ending = _ending(graph, views, output)
    strides = tuple(seen.values[root].stride() for root in views.roots)
    return Core(model, tuple(read), ending, strides)


class _Views:
    """The nodes that a graph's ending computes, and the `roots` whose results it needs for that."""

    def __init__(self, seen: Behaviour) -> None:
        self._seen = seen
        self.roots: list[fx.Node] = []
        self.nodes: set[fx.Node] = set()

    def trace(self, node: fx.Node) -> None:
        """Find out what is needed for the value of `node` at the end."""
        if node in self.nodes or node in self.roots or node.op == "placeholder":
            return
        bases = self._bases(node)
        if self._seen.is_tensor(node) and not any(map(self._hangs, bases)):
            self.roots.append(node)
            return
        if bases and _writes(node):
            raise Unserved("what it returns lies in memory that it wrote to")
        if not bases and not self._is_plain(node):
            raise Unserved(f"it returns what {node.name} makes, which is no tensor")
        self.nodes.add(node)
        for one in node.all_input_nodes:
            self.trace(one)

    def check(self) -> None:
        """Refuse roots that a plan cannot have as they are."""
        if not self.roots:
            raise Unserved("it computes nothing")
        if any(self._seen.values[root].layout is not torch.strided for root in self.roots):
            raise Unserved("it returns a sparse tensor")
        pairs = itertools.combinations(self.roots, 2)
        if any(self._seen.shares(one, other) for one, other in pairs):
            raise Unserved("what it returns shares memory, and not by views alone")

    def _bases(self, node: fx.Node) -> list[fx.Node]:
        return [one for one in node.all_input_nodes if self._seen.shares(node, one)]

    def _hangs(self, base: fx.Node) -> bool:
        """Whether what is taken from `base` is a view, and not a part of a tuple that was made."""
        made = base.op in ("placeholder", "get_attr") or self._seen.is_tensor(base)
        return made or bool(self._bases(base))

    def _is_plain(self, node: fx.Node) -> bool:
        """Whether it is a number, say, or a list of views."""
        return not tensors_of(self._seen.values.get(node))


def _writes(node: fx.Node) -> bool:
    return writes_first(node.target) or not may_be_view(node.target)


def _cut(
    graph: fx.GraphModule,
    roots: Sequence[fx.Node],
    held: dict[fx.Node, Tensor],
    plain: dict[fx.Node, Any],
    name: str,
) -> fx.GraphModule:
    """A graph of its own that returns `roots`, with these weights and plain values inside."""
    root, cut = nn.Module(), fx.Graph()
    values: dict[fx.Node, Any] = dict(plain)
    needed = _needed(graph, roots)
    for node in graph.graph.nodes:
        if node in plain or node.op == "output" or is_idle(node) or node not in needed:
            continue
        if node in held:
            values[node] = _hold(root, cut, node.name, held[node])
        elif node.op == "get_attr":
            values[node] = _hold(root, cut, str(node.target), _attribute(graph, node))
        else:
            values[node] = _copied(cut, node, values)
    cut.output(tuple(values[one] for one in roots))
    model = fx.GraphModule(root, cut, name)
    return model.eval()


def _needed(graph: fx.GraphModule, roots: Sequence[fx.Node]) -> set[fx.Node]:
    """The nodes that `roots` hang on, and those that write; no input that only an ending reads."""
    found = set(roots)
    for node in reversed(graph.graph.nodes):
        if node in found or (node.op not in ("placeholder", "output", "get_attr") and _acts(node)):
            found.add(node)
            found.update(node.all_input_nodes)
    return found


def _acts(node: fx.Node) -> bool:
    if is_idle(node):
        return False
    inplace = node.kwargs.get("inplace") is True or node.kwargs.get("out") is not None
    return inplace or writes_first(node.target) or node.is_impure()


def _hold(root: nn.Module, cut: fx.Graph, name: str, value: Any) -> fx.Node:
    name = name.replace(".", "_")
    if isinstance(value, nn.Parameter):
        root.register_parameter(name, value)
    elif isinstance(value, Tensor):
        root.register_buffer(name, value)
    else:
        raise Unserved(f"it holds a {type(value).__name__}")
    return cut.get_attr(name)


def _attribute(graph: fx.GraphModule, node: fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(graph)


def _copied(cut: fx.Graph, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """`node` in the new graph; its result, where that follows from numbers alone."""
    args = fx.node.map_arg(node.args, values.__getitem__)
    kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
    if node.op == "call_function" and _is_arithmetic(node.target):
        nodes: list[fx.Node] = []
        fx.node.map_arg((args, kwargs), nodes.append)
        if not nodes:
            return node.target(*args, **kwargs)
    if node.op == "placeholder":
        return cut.placeholder(node.name)
    copied = cut.create_node(node.op, node.target, args, kwargs, node.name)
    stack = node.meta.get("stack_trace")
    copied.meta = {"stack_trace": stack} if stack else {}
    return copied


def _is_arithmetic(function: Any) -> bool:
    """Whether it makes numbers of numbers, as what is asked of sizes does."""
    if getattr(function, "__module__", "") in _HOMES:
        return True
    name = getattr(function, "__name__", "")
    return name.startswith("sym_") or function is torch._check


def _ending(graph: fx.GraphModule, views: _Views, output: fx.Node) -> Callable[..., Any]:
    """From all inputs and the results of the core to what the graph returns."""
    ending = fx.Graph()
    values: dict[fx.Node, Any] = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        values[node] = ending.placeholder(node.name)
    for root in views.roots:
        values[root] = ending.placeholder(f"root_{root.name}")
    for node in graph.graph.nodes:
        if node in views.nodes:
            values[node] = ending.node_copy(node, values.__getitem__)
    ending.output(fx.node.map_arg(output.args[0], values.__getitem__))
    return fx.GraphModule(graph, ending).forward
