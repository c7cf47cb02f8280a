"""Graphs that are pickled node by node.

torch.fx pickles the code of a graph, and traces that again: it would run what no input reaches,
once for all calls to come, and give nodes other names than those by which plans know them.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from .edit import filled
from .names import is_made

_NOTED = ("is_wrapped", "may_return_input", "seen")
"""What later traces and passes ask of a node."""


class PickledGraph(fx.GraphModule):
    """A GraphModule that comes out of a pickle as it went in.

    >>> import pickle
    >>> graph = fx.symbolic_trace(lambda x: x + torch.zeros(2))
    >>> pickle.loads(pickle.dumps(PickledGraph(graph, graph.graph))).code == graph.code
    True
    """

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Cast no constant: the code makes it in its own type, whatever type the weights have."""
        made = []
        for path, value in [*self._tensors()]:
            if is_made(path) and _is_castable(value):
                holder, _, name = path.rpartition(".")
                part = self.get_submodule(holder)
                slots: Any = part._buffers if name in part._buffers else part._parameters
                made.append((slots, name, value))
                slots[name] = _like(value, _as_whole_numbers(value.detach()))
        try:
            return super()._apply(fn, recurse)
        finally:
            for slots, name, value in made:
                slots[name] = _like(value, _as_it_was(slots[name].detach(), value.detach()))

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.named_parameters(remove_duplicate=False)
        yield from self.named_buffers(remove_duplicate=False)

    def __reduce__(self) -> Any:
        state = {name: value for name, value in vars(self).items() if name != "_graph"}
        return _unpickled, (type(self).__name__, state, [*map(_row_of, self.graph.nodes)])

    @classmethod
    def _deepcopy_init(cls) -> Callable[..., None]:
        """What `copy.deepcopy` makes the copy with, which would be a `GraphModule` by name."""
        return functools.partial(cls.__init__, class_name=cls.__name__)


_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _is_castable(value: torch.Tensor) -> bool:
    cast = value.is_floating_point() or value.is_complex()
    return cast and value.layout is torch.strided and not (value.is_conj() or value.is_neg())


def _like(value: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """`made`, as a parameter if `value` is one."""
    wants = value.requires_grad and made.is_floating_point()
    return nn.Parameter(made, wants) if isinstance(value, nn.Parameter) else made


def _as_whole_numbers(value: torch.Tensor) -> torch.Tensor:
    """The bytes of `value` as a tensor that is moved like any other, and not cast."""
    real = torch.view_as_real(value) if value.is_complex() else value
    return real.view(_WHOLE[real.element_size()])


def _as_it_was(whole: Any, value: torch.Tensor) -> torch.Tensor:
    if whole.dtype not in _WHOLE.values():
        return value.to(whole.device)
    real = whole.view(value.dtype.to_real())
    return torch.view_as_complex(real) if value.is_complex() else real


class _Row(NamedTuple):
    """A node, with the name of the function that it calls if pickle would not find that."""

    name: str
    op: str
    target: Any
    args: Any
    kwargs: Any
    type: Any
    noted: dict[str, Any]


@dataclass(frozen=True)
class _Result:
    """The result of an earlier node, among arguments."""

    name: str


def _row_of(node: fx.Node) -> _Row:
    args, kwargs = filled((node.args, node.kwargs), lambda one: _Result(one.name))
    target = node.target if isinstance(node.target, str) else _named(node.target)
    noted = {name: value for name, value in node.meta.items() if name in _NOTED}
    return _Row(node.name, node.op, target, args, kwargs, node.type, noted)


def _named(function: Callable[..., Any]) -> Any:
    """A function's name if torch has it there; some of torch's are made in functions."""
    name = fx.node._get_qualified_name(function)
    with contextlib.suppress(AttributeError):
        if _in_torch(name) is function:
            return name
    return function


def _in_torch(name: str) -> Any:
    return operator.attrgetter(name.removeprefix("torch."))(torch)


def _unpickled(name: str, state: dict[str, Any], rows: Sequence[_Row]) -> PickledGraph:
    graph, known = fx.Graph(), dict[str, fx.Node]()

    def value_of(one: Any) -> Any:
        return known[one.name] if isinstance(one, _Result) else one

    for row in rows:
        called = row.op == "call_function" and isinstance(row.target, str)
        target = _in_torch(row.target) if called else row.target
        args, kwargs = fx.node.map_aggregate((row.args, row.kwargs), value_of)  # type: ignore[misc]
        node = graph.create_node(row.op, target, args, kwargs, row.name, row.type)
        node.meta.update(row.noted)
        known[row.name] = node
    result = PickledGraph.__new__(PickledGraph)
    type(result).__name__ = name
    vars(result).update(state)
    result.graph = graph
    return result
