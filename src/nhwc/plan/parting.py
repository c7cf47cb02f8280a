"""Calls that become others once shapes are known, in a copy of the graph that plans alone see.

A pass sees no shapes: to it the other operand of a sum is a residual. Kernels add residuals where
they store, number by number; a time embedding of N, C, 1, 1, or the offset that a gate computes, is
none. For such shapes the layer is called alone again, with the sum and the activation behind it.

Norms by the root of the mean square that are spelled out are one call (`roots`).

What is put into a part of a tensor gets the part for its shape alone, and is expanded to that.

Nothing is joined of a tensor without numbers, as decoders make them where an encoder has no image
of that size.

`max` along a dimension returns places as well. Where nobody reads these, `amax` is as good, though
it has other gradients where several numbers are the largest.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from ..graph import bound, module_of
from ..graph.modules.layers import Fused, as_elements
from ..graph.modules.leaves import opaque_by_nature
from ..graph.modules.mended import Cat
from ..operators.kinds import PUTTING_IN
from .composed import composed, write_composed
from .recognize import specified
from .recording import Record
from .roots import roots_in, write_root

_CATS = (torch.cat, torch.concat, torch.concatenate)


def parted(graph: fx.GraphModule, record: Record) -> fx.GraphModule | None:
    """`graph` with such calls replaced; None if there are none."""
    repeating = [node for node in graph.graph.nodes if _repeats(record, node)]
    largest = [node for node in graph.graph.nodes if _is_read_for_values(node)]
    stored = [node for node in graph.graph.nodes if _is_put_in(record, node)]
    joining = {node: some for node in graph.graph.nodes if (some := _joined(record, node))}
    roots = roots_in(graph, record)
    several = {node: write for node in graph.graph.nodes if (write := composed(record, node))}
    if not (repeating or largest or stored or joining or roots or several):
        return None
    copied = fx.Graph()
    named: dict[fx.Node, fx.Node] = {}
    copied.output(copied.graph_copy(graph.graph, named))  # type: ignore[arg-type]
    for node in repeating:
        fused = module_of(node)
        assert isinstance(fused, Fused)
        _part(copied, named[node], fused)
    for node in largest:
        _without_places(copied, named[node])
    for node in stored:
        _expand(copied, named[node], record.values[node].shape)
    for node, some in joining.items():
        named[node].update_arg(0, [named[one] for one in some])
    for root in roots:
        write_root(copied, root._replace(node=named[root.node], source=named[root.source]))
    for node, write in several.items():
        write_composed(copied, named[node], write, record.values[node.all_input_nodes[0]])
    return fx.GraphModule(graph, copied)


def _repeats(record: Record, node: fx.Node) -> bool:
    fused = module_of(node)
    if not isinstance(fused, Fused) or len(node.args) != 2 or node.kwargs:
        return False
    out, *given = (record.tensor(one) for one in (node, *node.all_input_nodes))
    if out is None or None in given or opaque_by_nature(fused) is not None:
        return False
    x, residual = given[0], given[-1]
    if fused.in_place and residual.dtype != out.dtype:  # type: ignore[union-attr]
        return False
    if residual.shape != out.shape:  # type: ignore[union-attr]
        return True
    alone = specified(fused.op, x)  # type: ignore[arg-type]
    return alone is not None and alone.output != out.shape


def _part(graph: fx.Graph, node: fx.Node, fused: Fused) -> None:
    """Call the layer of a `Fused` module, the sum and the activation, each by itself."""
    x, residual = node.args
    with graph.inserting_before(node):
        result = graph.call_module(f"{node.target}.op", (x,))
        both = (residual, result) if fused.residual_first else (result, residual)
        result = graph.call_function(operator.add, both)
        if fused.activation is not None:
            result = graph.call_module(f"{node.target}.activation", (result,))
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _is_read_for_values(node: fx.Node) -> bool:
    """Whether `node` asks for the largest numbers along a dimension, and for no places."""
    if node.target not in (torch.max, "max") or not node.users:
        return False
    given = bound(node, ("input", "dim", "keepdim"))
    plain = type(given.get("dim")) is int and type(given.get("keepdim", False)) is bool
    items = all(user.target is operator.getitem for user in node.users)
    return plain and items and {user.args[1] for user in node.users if user.users} == {0}


def _without_places(graph: fx.Graph, node: fx.Node) -> None:
    given = bound(node, ("input", "dim", "keepdim"))
    with graph.inserting_before(node):
        dim, keepdim = given["dim"], given.get("keepdim", False)
        found = graph.call_function(torch.amax, (given["input"], dim, keepdim))
    for user in [*node.users]:
        user.replace_all_uses_with(found)
        graph.erase_node(user)
    graph.erase_node(node)


def _is_put_in(record: Record, node: fx.Node) -> bool:
    """Whether `node` makes what is put into a tensor of something of the same type."""
    if node.target is not as_elements:
        return False
    out, given = record.tensor(node), record.tensor(node.args[0])  # type: ignore[arg-type]
    if out is None or given is None or len(given.shape) > len(out.shape):
        return False
    if any(user.target not in PUTTING_IN or user.args[1] is not node for user in node.users):
        return False
    return (out.dtype, out.device) == (given.dtype, given.device)


def _joined(record: Record, node: fx.Node) -> list[fx.Node]:
    """Of what `node` joins, what has numbers, if anything else of that type has none."""
    if node.target not in _CATS and not isinstance(module_of(node), Cat):
        return []
    out, parts = record.tensor(node), node.args[0] if node.args else None
    if out is None or not isinstance(parts, (list, tuple)):
        return []
    if not all(isinstance(part, fx.Node) for part in parts):
        return []
    shapes = [one.shape for one in map(record.tensor, parts) if one and one.dtype == out.dtype]
    some = [part for part, shape in zip(parts, shapes, strict=False) if 0 not in shape]
    return some if len(shapes) == len(parts) > len(some) > 0 else []


def _expand(graph: fx.Graph, node: fx.Node, shape: tuple[int, ...]) -> None:
    with graph.inserting_before(node):
        made = graph.call_method("expand", (node.args[0], *shape))
    node.replace_all_uses_with(made)
    graph.erase_node(node)
