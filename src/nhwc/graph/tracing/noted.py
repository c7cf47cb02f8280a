"""The graph that a recording writes: which node gives each tensor, and how a call is a node."""

from __future__ import annotations

import inspect
import itertools
import operator
from typing import Any, NoReturn

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from ...errors import of_kind
from ...models.trees import is_named_by_torch, tensors_of
from ..nodes.names import CONSTANT, sayable_function
from ..nodes.results import is_lost, made_by
from ..nodes.seen import note_seen
from ..nodes.writes import may_be_view, written_into
from ..plain import all_plain, is_derived
from .tracer import Tracer

_IN_PLACE = {"__iadd__": "add_", "__isub__": "sub_", "__imul__": "mul_", "__itruediv__": "div_"}
_IN_PLACE |= {"__idiv__": "div_", "__iand__": "bitwise_and_", "__ior__": "bitwise_or_"}

_SIGNS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv}
_SIGNS |= {"__div__": operator.truediv}
"""Torch calls `x + y` by the name of the method, and `1 / x` `__rdiv__`."""

_PLAIN = (
    *(str, bool, int, float, complex, type(None), type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


class Noted:
    """The graph so far, and where in it each tensor is that the code holds."""

    def __init__(self, root: fx.GraphModule) -> None:
        self.root = root
        self.graph = fx.Graph(owning_module=root, tracer_cls=Tracer)
        self.opaque: dict[str, str] = {}
        """Why the graph only calls some parts, by their paths."""
        self.values: dict[fx.Node, Any] = {}
        self.kept: list[Tensor] = []
        named = (*root.named_parameters(), *root.named_buffers())
        self._names = {id(tensor): name for name, tensor in named}
        # By identity: equal tensors are not the same one. `kept` keeps identities unique.
        self._places: dict[int, Any] = {}
        self._constants: list[tuple[Tensor, int]] = []
        self._refusal: fx.proxy.TraceError | None = None
        self._ends = False

    def check(self) -> None:
        """Raise what stopped the recording if the code caught it; refuse constants that changed."""
        if self._refusal is not None:
            raise self._refusal
        if any(tensor._version != version for tensor, version in self._constants):
            raise fx.proxy.TraceError("it writes into a tensor that it used before")

    def output(self, result: Any) -> None:
        """End the graph, which returns `result`."""
        self._ends = True
        self.graph.output(self.argument(result))

    def clean(self) -> None:
        """Take away nodes whose value the code only looked at."""
        for node in reversed(list(self.graph.nodes)):
            acts = node.op in ("placeholder", "output") or node.target in self.opaque
            if not node.users and not acts and written_into(node) is None:
                self.graph.erase_node(node)

    def place_of(self, tensor: Tensor) -> Any:
        """Where a tensor is: at a node, inside one's result (a pair of place and key), nowhere."""
        return self._places.get(id(tensor))

    def replace(self, tensor: Tensor, place: Any) -> None:
        """From now on the tensor is at `place`: it was written into."""
        self._places[id(tensor)] = place

    def refuse(self, reason: str) -> NoReturn:
        """Stop the recording, even if the user's code catches the error that this raises."""
        self._refusal = fx.proxy.TraceError(reason)
        raise self._refusal

    def keep(self, result: Any, place: Any) -> None:
        """Remember where each tensor of a result is: at a node, or inside one's result."""
        if isinstance(place, fx.Node):
            self.values[place] = result
            note_seen(place, result)
        if isinstance(result, Tensor):
            self._places[id(result)] = place
            self.kept.append(result)
        elif isinstance(result, tuple | list):
            if is_named_by_torch(result):
                self._places[id(result)] = place
            for index, item in enumerate(result):
                self.keep(item, (place, index))
        elif isinstance(result, dict):
            for key, item in result.items():
                self.keep(item, (place, key))
        elif tensors_of(result):
            self.refuse(f"a part that cannot be traced returns {of_kind(result)}")

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node that gives a tensor; one that no node gives becomes a constant."""
        place = self._places.get(id(tensor))
        if place is None:
            place = self._constant(tensor)
            self.keep(tensor, place)
        node = self._at(place)
        note_seen(node, tensor)
        self._places[id(tensor)] = node
        return node

    def _at(self, place: Any) -> fx.Node:
        if isinstance(place, fx.Node):
            return place
        holder, key = place
        return self.graph.call_function(operator.getitem, (self._at(holder), key))

    def _returned_by(self, value: tuple[Tensor, ...]) -> fx.Node:
        """The node that returned this tuple, which no code of a graph can make of its parts."""
        node: fx.Node | None = self._places.get(id(value))
        places = [self._places.get(id(item)) for item in value]
        parts = [p.args if isinstance(p, fx.Node) else p for p in places]
        if node is None or parts != [(node, index) for index in range(len(value))]:
            self.refuse(f"it changes what is in {of_kind(value)}")
        return node

    def _constant(self, tensor: Tensor) -> fx.Node:
        name = self._names.get(id(tensor))
        if name is None:
            if isinstance(tensor, FakeTensor):
                self.refuse("it makes a tensor in a way that cannot be followed")
            names = (f"{CONSTANT}{number}" for number in itertools.count())
            name = next(name for name in names if not hasattr(self.root, name))
            setattr(self.root, name, tensor)
        if not tensor.is_inference():
            self._constants.append((tensor, tensor._version))
        return self.graph.create_node("get_attr", name)

    def argument(self, value: Any) -> Any:
        """`value` with nodes in the place of tensors, as a graph holds it."""
        if isinstance(value, Tensor):
            return self.node_of(value)
        if is_named_by_torch(value):
            return self._returned_by(value)
        arguments = made_by(value)
        if arguments is not None:
            return self.graph.call_function(type(value), *self.argument(arguments))
        if is_lost(value):
            return self._refuse_kind(value)
        if self._ends and isinstance(value, torch.Size):
            # Arguments of calls may be plain tuples.
            return self.graph.call_function(torch.Size, (tuple(value),))
        if isinstance(value, tuple):
            items = [self.argument(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, list):
            return [self.argument(item) for item in value]
        if isinstance(value, slice):
            return slice(*map(self.argument, (value.start, value.stop, value.step)))
        if isinstance(value, dict):
            return {key: self.argument(item) for key, item in value.items()}
        if isinstance(value, _PLAIN) and not is_derived(value):
            return value
        return self._refuse_kind(value)

    def _refuse_kind(self, value: object) -> Any:
        return self.refuse(f"it {'returns' if self._ends else 'works with'} {of_kind(value)}")

    def call_module(self, path: str, args: Any, kwargs: Any) -> fx.Node:
        """A node that calls a module as a whole."""
        node = self.graph.call_module(path, self.argument(args), self.argument(kwargs))
        module = self.root.get_submodule(path)
        shares = getattr(module, "inplace", False) or may_be_view(module)
        node.meta["may_return_input"] = path in self.opaque or shares
        return node

    def call(self, function: Any, args: Any, kwargs: Any) -> fx.Node:
        """A node that calls `function` as code would say it."""
        name, args = name_of(function), self.argument(all_plain(args))
        kwargs = self.argument(all_plain(kwargs))
        if function.__name__ in ("__set__", "__delete__"):
            self.refuse("it sets an attribute of a traced value")
        if function.__name__ == "__get__":
            return self.graph.call_function(getattr, (args[0], name))
        if not _is_method(function, name):
            return self.graph.call_function(function, args, kwargs)
        if name in _IN_PLACE:
            return self.graph.call_method(_IN_PLACE[name], args, kwargs)
        sign = _sign(name) if len(args) < 3 and not kwargs else None
        if sign is not None:
            return self.graph.call_function(sign, args)
        mirrored = _sign(f"__{name[3:]}") if name.startswith("__r") else None
        if mirrored is not None:
            args = args[::-1]
            return self.graph.call_function(sayable_function(mirrored, args), args)
        return self.graph.call_method(name, args, kwargs)


def name_of(function: Any) -> str:
    """The name of a function or method; of an attribute's getter, that of the attribute."""
    own = getattr(function, "__name__", str(function))
    return function.__self__.__name__ if own in ("__get__", "__set__", "__delete__") else own


def _is_method(function: Any, name: str) -> bool:
    """Whether it is the method of this name, or what torch wraps around it: `x ** 2` calls one."""
    method = getattr(Tensor, name, None)
    return method is not None and inspect.unwrap(method) == inspect.unwrap(function)


def _sign(name: str) -> Any:
    if name in _SIGNS:
        return _SIGNS[name]
    return getattr(operator, name, None) if name.startswith("__") else None
