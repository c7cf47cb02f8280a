"""Truth as numbers: a comparison gives 1 and 0, and what reads it computes with these.

    x > 0  --> & --> unsqueeze --> masked_fill(y, ..., -inf)
    x < y  --^

Kernels know float32 alone. So each comparison of it, what is made of several, and what only moves
one, stands in the graph as numbers, and so does how many are true. Anything else that is true or
false becomes numbers by `.float()`; what is constant does so once, with the plan.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ..graph import bound, written_into
from .recording import Record
from .roots import called_name


def compared(x: Tensor, other: Any, how: str) -> Tensor:
    """1.0 where `torch.<how>(x, other)` holds, and 0.0 elsewhere."""
    holds: Tensor = getattr(torch, how)(x, other)
    return holds.float()


def replaced(x: Tensor, where: Tensor, number: float, answer: float) -> Tensor:
    """The number where `where` is `answer`, which is 1.0 or 0.0, and x elsewhere."""
    return torch.where(where == answer, number, x)


def marked(x: Tensor, where: Tensor, number: float, answer: float) -> Tensor:
    """The same, contiguous, as torch fills: a `where` lies as its first argument."""
    return x.masked_fill(where == answer, number)


def marked_in_place(x: Tensor, where: Tensor, number: float, answer: float) -> Tensor:
    """The same, which lies in memory as x does."""
    return x.clone().masked_fill_(where == answer, number)


def chosen(where: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """`one` where `where` is 1.0, and `other` where it is 0.0."""
    return torch.where(where != 0, one, other)


def chosen_to_fill(where: Tensor, one: Tensor, x: Tensor) -> Tensor:
    """The same, of one number in a tensor, contiguous."""
    return x.masked_fill(where != 0, one)


def chosen_in_place(where: Tensor, one: Tensor, x: Tensor) -> Tensor:
    """The same, which lies in memory as x does."""
    return x.clone().masked_fill_(where != 0, one)


class NumberCall(NamedTuple):
    """A function and its arguments: numbers, nodes of a record, of which some are truth, and calls.

    Where there is no function, the one argument is the result.
    """

    function: Callable[..., Any] | None
    args: tuple[Any, ...]


def numbered(graph: fx.GraphModule, record: Record) -> fx.GraphModule | None:
    """`graph` with numbers for truth that numbers of float32 are computed from; None if there is
    none."""
    changed = [written_into(node) for node in record.values]
    changed += [target for _, target in record.writes]
    if any(isinstance(one, tuple) or _is_truth(record, one) for one in changed):
        return None
    readers = {node: call for node in record.values if (call := _reading(record, node))}
    if not readers:
        return None
    copied = fx.Graph()
    named: dict[fx.Node, fx.Node] = {}
    copied.output(copied.graph_copy(graph.graph, named))  # type: ignore[arg-type]
    numbers = _Numbers(copied, record, named)
    for node, call in readers.items():
        old = named[node]
        with copied.inserting_before(old):
            named[node] = numbers.written(call)
        old.replace_all_uses_with(named[node])
        copied.erase_node(old)
    numbers.erase_unread()
    return fx.GraphModule(graph, copied)


class _Numbers:
    """The numbers that stand for truth in a graph, whose nodes for those of the record are `named`.

    Each stands behind the node that it stands for.
    """

    def __init__(self, graph: fx.Graph, record: Record, named: dict[fx.Node, fx.Node]) -> None:
        self._graph, self._record, self._named = graph, record, named
        self._made: dict[fx.Node, fx.Node] = {}

    def written(self, call: NumberCall) -> fx.Node:
        """What computes it in the graph, with numbers for truth."""
        function, args = call
        given = tuple(map(self._given, args))
        return self._graph.call_function(function, given) if function else given[0]

    def erase_unread(self) -> None:
        """Erase the truth that numbers stand for, where nobody reads it any more."""
        made = [node for node in reversed(self._record.values) if node in self._made]
        for node in made:
            known = _said(self._record, node) or _moves(self._record, node)
            if known and not self._named[node].users:
                self._graph.erase_node(self._named.pop(node))

    def _given(self, one: Any) -> Any:
        if isinstance(one, NumberCall):
            return self.written(one)
        if not isinstance(one, fx.Node):
            return one
        if not _stands(self._record, one):
            return self._named[one]
        if one not in self._made:
            # A value may be written into later: it is read where the truth of it was.
            behind = self._named[one].next
            while behind.op == "placeholder":
                behind = behind.next
            with self._graph.inserting_before(behind):
                self._made[one] = self._number(one)
        return self._made[one]

    def _number(self, node: fx.Node) -> fx.Node:
        call, truth = _said(self._record, node), self._named[node]
        if call is not None:
            return self.written(call)
        if not _moves(self._record, node):
            return self._graph.call_method("float", (truth,))
        given = {self._named[one]: self._given(one) for one in _truths(self._record, node)}
        return self._graph.node_copy(truth, lambda one: given.get(one, one))


def _reading(record: Record, node: fx.Node) -> NumberCall | None:
    """How a node that reads truth computes numbers from numbers; None for any other."""
    if not _is_float(record, node) or not _truths(record, node):
        return None
    name = called_name(node)
    args = tuple(record.known(one) for one in node.args)
    if name == "masked_fill":
        given = bound(node, ("input", "mask", "value"))
        args = tuple(record.known(given.get(key)) for key in ("mask", "value", "input"))
        if written_into(node) is not None:
            return _where(record, *args, put=marked_in_place, choose=chosen_in_place)
        return _where(record, *args, put=marked, choose=chosen_to_fill)
    if node.kwargs:
        return None
    if name == "where" and len(args) == 3:
        return _where(record, *((args[1], args[0], args[2]) if node.op == "call_method" else args))
    if name == "index_put" and len(args) == 3:
        return _put(record, *args)
    if name in _ARITHMETIC and len(args) == 2:
        beside = [one for one in args if not _is_float(record, one)]
        known = len(beside) == 1 and (_is_count(record, beside[0]) or name == "mul")
        return NumberCall(_ARITHMETIC[name], args) if known and _stands(record, beside[0]) else None
    if name in _CASTS and _is_computed(record, args[0]):
        return NumberCall(None, args[:1])
    return None


def _is_computed(record: Record, node: Any) -> bool:
    """Whether it is truth of which some is computed from numbers."""
    if _moves(record, node):
        return any(_is_computed(record, one) for one in _truths(record, node))
    return _said(record, node) is not None


def _where(
    record: Record,
    where: Any,
    one: Any,
    other: Any,
    *,
    put: Callable[..., Any] = replaced,
    choose: Callable[..., Any] = chosen,
) -> NumberCall | None:
    if not _is_truth(record, where):
        return None
    floats, numbers = (
        [of(x) for x in (one, other)] for of in (partial(_is_float, record), _is_number)
    )
    if all(floats):
        return NumberCall(choose, (where, one, other))
    if not all(is_float or is_number for is_float, is_number in zip(floats, numbers, strict=True)):
        return None
    found: Any = where if all(numbers) else one if floats[0] else other
    for number, answer in ((one, 1.0), (other, 0.0)):
        if _is_number(number):
            found = NumberCall(put, (found, where, float(number), answer))
    return found  # type: ignore[no-any-return]


def _put(record: Record, x: Any, places: Any, value: Any) -> NumberCall | None:
    """One number where a mask of the same shape says so."""
    number = value.args[-1] if called_name(value) == "new_full" and len(value.args) == 3 else None
    same = len(places) == 1 and _is_truth(record, places[0])
    same = same and record.values[places[0]].shape == record.values[x].shape
    if not same or not _is_number(number):
        return None
    return _where(record, places[0], number, x, put=marked_in_place)


def _said(record: Record, node: Any) -> NumberCall | None:
    """How truth, or a count of it, is computed from numbers; None where it is not known."""
    name, args = called_name(node), getattr(node, "args", ())
    if _type(record, node) is torch.int64:
        return _counted(record, node)
    if name in ("any", "all"):
        return _of_several(record, node)
    if not name or node.kwargs or not 1 <= len(args) <= 2:
        return None
    args = tuple(record.known(one) for one in args)
    if all(_is_truth(record, one) for one in args):
        if len(args) == 1:
            return NumberCall(compared, (*args, 0, "eq")) if name in _NOT else None
        if name in _DIFFER:
            return NumberCall(compared, (*args, _DIFFER[name]))
        return NumberCall(_OF_TWO[name], args) if name in _OF_TWO else None
    if name in _OF_ONE and len(args) == 1:
        return _OF_ONE[name](*args) if _is_float(record, args[0]) else None
    if name == "to" and args[1:] == (torch.bool,) and _is_float(record, args[0]):
        return NumberCall(compared, (args[0], 0, "ne"))
    floats = [_is_float(record, one) or _is_count(record, one) for one in args]
    if name not in _SWAPPED or len(args) == 1 or not any(floats):
        return None
    if not all(is_float or _is_number(one) for is_float, one in zip(floats, args, strict=True)):
        return None
    if floats[0]:
        return NumberCall(compared, (*args, name))
    return NumberCall(compared, (*args[::-1], _SWAPPED[name]))


def _of_several(record: Record, node: fx.Node) -> NumberCall | None:
    """`any` or `all` along dimensions."""
    given = bound(node, ("input", "dim", "keepdim"))
    x, dims = given.pop("input"), given.get("dim")
    if not _is_truth(record, x) or not isinstance(dims, (int, tuple, list)):
        return None
    if 0 in record.values[x].shape:  # Of no numbers none is the largest.
        return None
    most = torch.amax if called_name(node) == "any" else torch.amin
    return NumberCall(most, (x, dims, given.get("keepdim", False)))


def _counted(record: Record, node: fx.Node) -> NumberCall | None:
    """How many are true along dimensions, as far as float32 can count, or so many at least."""
    if called_name(node) == "clamp":
        given = bound(node, ("input", "min", "max"))
        x, bounds = given.pop("input"), (given.pop("min", None), given.pop("max", None))
        plain = not given and all(one is None or _is_number(one) for one in bounds)
        return NumberCall(torch.clamp, (x, *bounds)) if plain and _is_count(record, x) else None
    given = bound(node, ("input", "dim", "keepdim"))
    x, dims = given.get("input"), given.get("dim")
    plain = called_name(node) == "sum" and isinstance(dims, (int, tuple, list))
    if not plain or not given.keys() <= {"input", "dim", "keepdim"} or not _is_truth(record, x):
        return None
    few = math.prod(record.values[x].shape) <= 1 << 24  # type: ignore[index]
    return NumberCall(torch.sum, (x, dims, given.get("keepdim", False))) if few else None


def _moves(record: Record, node: Any) -> bool:
    """Whether `node` only moves truth, or joins it with other."""
    name = called_name(node)
    # `view(torch.bool)` reads bytes, of which numbers have more.
    bytewise = name == "view" and torch.bool in (*node.args, *node.kwargs.values())
    truths = _truths(record, node) if name in _MOVES | _JOINS and not bytewise else []
    # Numbers that are put into truth are no truth, and truth that says which is taken is no number.
    first = truths[:1] == node.all_input_nodes[:1]
    return bool(truths) and first and (len(truths) == 1 or name in _JOINS)


def _truths(record: Record, node: fx.Node) -> list[fx.Node]:
    return [one for one in node.all_input_nodes if _stands(record, one)]


def _stands(record: Record, node: Any) -> bool:
    """Whether numbers can stand for it."""
    return _is_truth(record, node) or _is_count(record, node)


def _is_count(record: Record, node: Any) -> bool:
    return _type(record, node) is torch.int64 and _counted(record, node) is not None


def _is_truth(record: Record, node: Any) -> bool:
    return _type(record, node) is torch.bool


def _is_float(record: Record, node: Any) -> bool:
    return _type(record, node) is torch.float32


def _type(record: Record, node: Any) -> torch.dtype | None:
    seen = record.tensor(node) if isinstance(node, fx.Node) else None
    return seen.dtype if seen else None


def _is_number(value: Any) -> bool:
    """Whether kernels can be given `value`, as torch takes it."""
    return type(value) in (int, float) and not _LARGEST < abs(value) < math.inf


_LARGEST = torch.finfo(torch.float32).max
_CASTS = ("float", "to", "type_as")
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
}
_SWAPPED = {"gt": "lt", "ge": "le", "lt": "gt", "le": "ge", "eq": "eq", "ne": "ne"}
"""Each comparison, and the one that holds for its operands the other way round."""
_MOVES = {
    *("unsqueeze", "squeeze", "view", "reshape", "flatten", "unflatten", "permute", "transpose"),
    *("expand", "expand_as", "view_as", "repeat", "repeat_interleave", "getitem", "contiguous"),
    *("clone", "roll", "flip", "broadcast_to", "movedim", "select", "narrow", "detach"),
}
_JOINS = {"cat", "stack", "slice_scatter", "select_scatter", "as_elements"}
_NOT = {"invert", "__invert__", "bitwise_not", "logical_not"}
_DIFFER = {
    **dict.fromkeys(("xor", "__xor__", "bitwise_xor", "logical_xor", "ne"), "ne"),
    "eq": "eq",
}
_OF_TWO: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("and", "__and__", "bitwise_and", "logical_and", "mul"), operator.mul),
    **dict.fromkeys(("or", "__or__", "bitwise_or", "logical_or"), torch.maximum),
}
"""What numbers for truth are computed with, as truth is by these names."""
_OF_ONE: dict[str, Callable[[Any], NumberCall]] = {
    "bool": lambda x: NumberCall(compared, (x, 0, "ne")),
    "isnan": lambda x: NumberCall(compared, (x, x, "ne")),
    "isinf": lambda x: NumberCall(compared, (NumberCall(torch.abs, (x,)), math.inf, "eq")),
    "isfinite": lambda x: NumberCall(compared, (NumberCall(torch.abs, (x,)), math.inf, "lt")),
}
