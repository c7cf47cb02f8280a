"""Find the nodes of a graph that write into an existing tensor."""

from __future__ import annotations

import inspect
from typing import Any

import torch.nn.functional as F
from torch import fx
from torch.utils._pytree import tree_leaves

from ...operators.kinds import may_be_view as may_be_view
from ...operators.kinds import returns_what_it_writes, writes_first, written_arguments
from .edit import module_of


def result_may_be_view(node: fx.Node) -> bool:
    """Whether the result of `node` may share memory with what it is given."""
    module = module_of(node)
    # A module may have a length, which may be 0, or none to tell, as one that is compiled.
    return may_be_view(node.target if module is None else module)


def puts_back(node: fx.Node) -> bool:
    """Whether `node` does nothing but copy a result into an input when all else is done."""
    if node.op != "call_method" or node.target != "copy_" or node.users:
        return False
    target = node.args[0]
    given = isinstance(target, fx.Node) and target.op == "placeholder"
    return given and (node.next.op == "output" or puts_back(node.next))


def written_into(node: fx.Node) -> Any:
    """Return what `node` writes into (`add_`, `out=`, `inplace=True`); None if nothing.

    >>> graph = fx.symbolic_trace(lambda x: F.relu(x.exp(), True)).graph
    >>> [str(written_into(node)) for node in graph.nodes]
    ['None', 'None', 'exp', 'None']
    """
    first = node.args[0] if node.args else None
    if node.kwargs.get("inplace") is True:
        return node.kwargs.get("input", first)
    if node.kwargs.get("out") is not None:
        return node.kwargs["out"]
    if node.op == "call_module":
        return first if getattr(module_of(node), "inplace", False) else None
    if node.op not in ("call_function", "call_method"):
        return None
    if writes_first(node.target):
        return first
    written = written_arguments(node.target)
    if written:
        given = [node.args[place] for place in written.values() if place < len(node.args)]
        given += [value for name, value in node.kwargs.items() if name in written]
        return given[0] if len(given) == 1 else tuple(given)
    if getattr(node.target, "__module__", "") == F.__name__ and len(node.args) > 1:
        assert callable(node.target)
        parameters = list(inspect.signature(node.target).parameters)
        if dict(zip(parameters, node.args, strict=False)).get("inplace") is True:
            return first
    return None


def targets_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that `node` writes into: `torch.max(x, 0, out=pair)` has two."""
    return [one for one in tree_leaves(written_into(node)) if isinstance(one, fx.Node)]


def written_and_returned(node: fx.Node) -> fx.Node | None:
    """Return what `node` writes into, if that is one value and the result is that, too.

    >>> graph = fx.symbolic_trace(lambda x: x.exp_()).graph
    >>> [str(written_and_returned(node)) for node in graph.nodes]
    ['None', 'x', 'None']
    """
    value = written_into(node)
    is_result = isinstance(value, fx.Node) and returns_what_it_writes(node.target)
    return value if is_result else None


def follow_writes(gm: fx.GraphModule) -> None:
    """Let what comes behind a write read the result of the write, not what was written into.

    >>> gm = fx.symbolic_trace(lambda x: (x.exp(), x))
    >>> x, y, _ = gm.graph.nodes
    >>> with gm.graph.inserting_after(y):
    ...     written = gm.graph.call_method("relu_", (y,))
    >>> follow_writes(gm)
    >>> [str(one) for one in gm.graph.output_node().args[0]]
    ['relu_', 'x']

    They are one tensor, and a graph that says so can be planned.
    """
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    for write in gm.graph.nodes:
        value = written_and_returned(write)
        if value is None or not value.op.startswith("call"):
            continue
        for user in [user for user in value.users if order[user] > order[write]]:
            user.replace_input_with(value, write)
