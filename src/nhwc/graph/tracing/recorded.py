"""Record one run of a model on tensors without values: a graph for the shapes of that run.

Code gets real tensors here (torch's fake ones: shapes, types and devices, but no values), not
values that stand for them as in `tracer`. So every question of Python's has its true answer:
`type(x)`, `x is None`, what a dict holds, which hook runs. Each call of torch becomes a node. One
that is given nothing that depends on the inputs has the same result in every run: it runs with its
values, and the graph gets them as constants. Code that asks for any other value is refused, unless
it is one of the whole numbers of an input that the graph is made for.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ...models.places import by_call, is_open_ended, places
from ...models.preserve import mark_generators
from ...models.trees import storage_of, tensors_of
from ...operators.kinds import SHAPE_ATTRIBUTES, SHAPE_METHODS, STRIDE_METHODS
from ...verify import cloned
from ..code.mentions import may_read_later
from ..code.questions import asks_sameness
from ..effects.kept import Kept
from ..effects.outside import Outside
from ..effects.replaced import replaced
from ..effects.state import Changed, State
from ..modules.layers import Spread
from ..modules.leaves import IN_OWN_CALL, calls_otherwise, is_leaf, watched_from_outside
from ..nodes.arguments import type_like
from ..nodes.counts import assert_counts, numbers_in
from ..nodes.edit import copied, filled
from ..nodes.flat import is_nested, with_leaves
from ..nodes.memory import seen_later
from ..nodes.writes import targets_of, written_into
from .assigned import assigned
from .doubts import RESETS
from .modes import SEEDS, modes
from .noted import Noted, name_of
from .traced import check_writes
from .transformers import is_spelled_out, spelled_out

MOST = 5000
"""The most nodes that a graph may have: recording a loop over pixels would take minutes."""

_ANSWERED = {*SHAPE_METHODS, *SHAPE_ATTRIBUTES, "__len__", "__hash__", "ndimension", "nelement"}
_ANSWERED |= {"is_complex", "element_size", "itemsize", "is_tensor", "result_type", "is_same_size"}
_ANSWERED |= {f"is_{kind}" for kind in ("sparse", "quantized", "nested", "cpu", "meta", "mps")}
"""What follows from a tensor's shape, type and device."""

_FILLED: dict[str, int | None] = {"new_zeros": 0, "zeros_like": 0, "new_ones": 1, "ones_like": 1}
_FILLED |= {"new_full": None, "full_like": None}
"""Their results follow from the type, shape and device of a tensor, and from a number."""

_AS_OTHER = {"view_as": Tensor.view, "reshape_as": Tensor.reshape, "expand_as": Tensor.expand}
"""They read nothing of the other tensor but its shape."""

_OF_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
    fake_tensor.UnsupportedOperatorException,
)


def record_run(
    root: fx.GraphModule, inputs: Sequence[Any], counts: Collection[int] = ()
) -> tuple[fx.Graph, dict[str, str]]:
    """The graph of `root` for inputs of these shapes; also why it only calls some parts.

    It is made for the numbers of the inputs at the places `counts`, too, which it checks. It names
    the modules and tensors of `root`, which gets the constants that the code makes. What the code
    keeps in attributes that no call reads, neither this one nor one for other sizes, the graph does
    not: `unset` of its owner's `meta` names these.
    """
    _check_sameness(root, inputs)
    try:
        return _recorded(root, inputs, counts)
    except Changed as error:
        changed = [(name, vars(part).get(name)) for part, name in error.attributes]
        if any(may_read_later(root.modules(), name, kept) for name, kept in changed):
            raise
        return _recorded(root, inputs, counts, Kept(error.attributes))


def _recorded(
    root: fx.GraphModule, inputs: Sequence[Any], counts: Collection[int], kept: Kept | None = None
) -> tuple[fx.Graph, dict[str, str]]:
    mark_generators()
    recorder, state, outside = _Recorder(root), State(root), Outside(root)
    noted = recorder.noted
    try:
        with kept or contextlib.nullcontext(), spelled_out(root), recorder.calls_seen():
            given = recorder.placeholders(inputs, counts)
            before = with_leaves(given, id)
            with recorder:
                args, named = by_call(root, given)
                result = nn.Module.__call__(root, *args, **named)
        noted.check()
        if with_leaves(given, id) != before:
            raise fx.proxy.TraceError("it changes a list or a dict that it is given")
        if any(_differ(given[place], inputs[place]) for place in counts):
            raise fx.proxy.TraceError("it writes into the numbers that it is given")
        state.check(kept)
        _check_outside(outside, root, inputs)
        noted.output(result)
        check_writes(noted.graph)
        noted.clean()
        assert_counts(noted.graph, inputs, counts)
    except Exception:
        state.restore()
        outside.put_back()
        raise
    if kept is not None:
        state.put_back(kept.attributes)
        root.meta["unset"] = tuple(_said(state, part, name) for part, name in kept.attributes)
    spare_writes(noted.graph, noted.values.__getitem__, recorder.quietly)
    return noted.graph, noted.opaque


def _check_sameness(root: nn.Module, inputs: Sequence[Any]) -> None:
    """Refuse code that may ask whether two inputs are one, which they are in some calls alone."""
    kinds = [(x.shape, x.dtype, x.device) for x in tensors_of(inputs)]
    if len({*kinds}) < len(kinds) and (place := asks_sameness(root)):
        raise fx.proxy.TraceError(f"it asks whether two inputs are the same tensor ({place})")


def _check_outside(outside: Outside, root: nn.Module, inputs: Sequence[Any]) -> None:
    """Raise what a graph would lose outside of `root`, if a call with values writes there as well.

    Code that notes what to do with a type, as einops does, meets that of the fake tensors anew.
    """
    try:
        outside.check()
    except fx.proxy.TraceError:
        args, named = by_call(root, cloned(inputs))
        root(*args, **named)
        if outside.put_back():
            raise


def _differ(one: Tensor, other: Tensor) -> bool:
    return one.shape != other.shape or numbers_in(one) != numbers_in(other)


def _said(state: State, part: nn.Module, name: str) -> str:
    path = state.name_of(part)
    return f"{path}.{name}" if path else name


def spare_writes(
    graph: fx.Graph,
    value_of: Callable[[fx.Node], Any],
    quietly: Callable[[Any, Any, Any], Any],
) -> None:
    """Turn `x.add_(y)` into `x.add(y)` where nothing else sees x: plans need pure graphs.

    The result must have the type and shape of x: `quietly` calls a function on what `value_of`
    tells of the nodes.
    """
    nodes = list(graph.nodes)
    order = {node: place for place, node in enumerate(nodes)}
    methods = [n for n in nodes if n.op == "call_method" and written_into(n)]
    for node in [n for n in methods if not seen_later(n, order)]:
        function = getattr(Tensor, str(node.target).removesuffix("_"), None)
        if function is None:
            continue
        try:
            args, kwargs = filled((node.args, node.kwargs), value_of)
            result = quietly(function, args, kwargs)
        except Exception:
            continue
        if result.shape == args[0].shape and result.dtype == args[0].dtype:
            node.target = str(node.target).removesuffix("_")


class _Recorder(TorchFunctionMode):
    """Runs the code, and notes each call that depends on the inputs."""

    def __init__(self, root: fx.GraphModule) -> None:
        super().__init__()
        self.noted = Noted(root)
        self._fake = fake_tensor.FakeTensorMode(
            allow_non_fake_inputs=True, allow_fallback_kernels=False
        )
        self._modes, self._drawn = modes(), torch.get_rng_state()
        self._quiet = False
        self._paths = {module: path for path, module in root.named_modules()}
        self._training = {part for part in root.modules() if part.training}
        self._made: set[int] = set()
        # What code made contiguous that was so already: in a call with other strides, a copy.
        self._maybe_copied: set[Any] = set()
        # The memory of numbers that code may count by.
        self._counted: set[int] = set()
        # Code may ask for the shapes of parameters, not for values that training changes.
        self._fakes: dict[int, Tensor] = {}
        self._fakes |= {id(p): self._fake.from_tensor(p) for p in root.parameters()}

    def placeholders(self, inputs: Sequence[Any], counts: Collection[int]) -> list[Any]:
        """Make a node for each argument that is given, and return what to run on."""
        values: list[Any] = []
        names = _names_of(self.noted.root, len(inputs))
        for place, (name, value) in enumerate(zip(names, inputs, strict=True)):
            plain = None if is_nested(value) else type_like(value)
            declared = Tensor if isinstance(value, Tensor) else plain
            node = self.noted.graph.placeholder(name, type_expr=declared)
            if place in counts:
                # What is contiguous already is no copy where code makes it so.
                value = value.clone(memory_format=torch.contiguous_format)
                self._counted.add(storage_of(value))
            else:
                value = with_leaves(value, self._without_numbers)
            self.noted.keep(value, node)
            values.append(value)
        return values

    def _without_numbers(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._fake.from_tensor(value)
        if not isinstance(value, int | float | bool | str | type(None)):
            raise fx.proxy.TraceError("its arguments are more than tensors and plain values")
        return value

    def calls_seen(self) -> contextlib.AbstractContextManager[None]:
        """Record calls of modules that a graph calls as a whole."""
        own = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            path = "" if self._quiet else self._paths.get(module, "")
            reason = watched_from_outside(module) if path else None
            if not path or (reason is None and _is_followed(module)):
                return own(module, *args, **kwargs)
            if calls_otherwise(module):
                self.noted.refuse(IN_OWN_CALL)
            if module.training is not (module in self._training):
                self.noted.refuse(RESETS)
            if reason is not None:
                self.noted.opaque[path] = reason
            with torch._C.DisableTorchFunction():  # Noting a weight asks it what it is.
                node = self.noted.call_module(path, args, kwargs)
            return self._called(node, lambda *a, **k: own(module, *a, **k), args, kwargs)

        def unwrapped(_: Any, graph: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # The wrapper of torch.fx prints what is raised in it.
            return nn.Module.__call__(graph, *args, **kwargs)

        wrapper = fx.graph_module._WrappedCall
        return replaced((nn.Module, "__call__", call), (wrapper, "__call__", unwrapped))

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._quiet:
            return function(*args, **kwargs)
        name = name_of(function)
        names_its_type = name == "type" and len(args) + len(kwargs) == 1
        # What sets the mode also puts it back: refused there, the code would leave it changed.
        if name in _ANSWERED or names_its_type or name == "_set_grad_enabled":
            return self._run(function, args, kwargs)
        if modes() != self._modes:
            self.noted.refuse("it runs parts in another precision, or with gradients")
        if name in _AS_OTHER:
            other = kwargs["other"] if kwargs else args[1]
            function, args, kwargs = _AS_OTHER[name], (args[0], tuple(other.shape)), {}
        if name in ("__getitem__", "__setitem__"):
            args = (args[0], fx.node.map_aggregate(args[1], self._as_number), *args[2:])
        if name == "__getitem__":
            args = (args[0], self._with_places(args[1]))
        if name == "repeat_interleave":
            kwargs = self._with_size(args, kwargs)
        given = tensors_of((args, kwargs))
        if not any(map(self._is_unknown, given)):
            if name in STRIDE_METHODS and any(storage_of(t) in self._counted for t in given):
                self.noted.refuse("it asks how the numbers that it is given lie in memory")
            return self._make(function, args, kwargs)
        if name in ("numpy", "__array__", "__dlpack__"):
            self.noted.refuse("it asks for the numbers of a traced value")
        if name == "__setitem__":
            return self._assign(*args)
        if name in ("to", "type_as") and len(given) == 2 and not self._is_unknown(given[0]):
            # The other one is unknown, but for its type and device.
            like = {"dtype": given[1].dtype, "device": given[1].device}
            rest = {key: value for key, value in kwargs.items() if key != "other"}
            return self._make(Tensor.to, (given[0],), like | rest)
        if name in _FILLED:
            return self._fill(name, function, args, kwargs)
        return self._called(self.noted.call(function, args, kwargs), function, args, kwargs)

    def _make(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run what no input reaches; what it returns may become a constant."""
        given = [(t, t._version) for t in tensors_of((args, kwargs)) if not t.is_inference()]
        result = self._run(function, args, kwargs)
        if any(t._version != version and id(t) not in self._made for t, version in given):
            self.noted.refuse("its forward writes into a tensor that it keeps")
        for tensor in tensors_of(result):
            if not any(tensor is one for one, _ in given):
                self._made.add(id(tensor))
                self.noted.kept.append(tensor)
        return result

    def _fill(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        like = self._run(function, args, kwargs)
        number = _FILLED[name]
        if number is None:
            number = kwargs["fill_value"] if "fill_value" in kwargs else args[-1]
        if isinstance(number, Tensor):
            return self._called(self.noted.call(function, args, kwargs), function, args, kwargs)
        made = {"size": like.shape, "fill_value": number, "dtype": like.dtype}
        return self._make(torch.full, (), {**made, "device": like.device})

    def _called(self, node: fx.Node, function: Any, args: Any, kwargs: Any) -> Any:
        """Run what `node` stands for, on tensors without values if any argument has none."""
        if len(self.noted.graph.nodes) > MOST:
            self.noted.refuse(f"it makes more than {MOST} calls for these sizes")
        if not torch.equal(self._drawn, torch.get_rng_state()):
            self.noted.refuse(SEEDS)
        given = tensors_of((args, kwargs))
        with torch._C.DisableTorchFunction():  # A module is called in the mode, and is no question.
            written = self._written(node, given)
        try:
            result = self._run(function, args, kwargs, without_values=node.op == "call_module")
        except Exception:
            self.noted.graph.erase_node(node)
            raise
        if not tensors_of(result):
            if not written:
                self.noted.graph.erase_node(node)
                # Compared with a text, say: then Python asks that, and takes both for unlike.
                told = result is not None and result is not NotImplemented
                if told or node.target is getattr:
                    self.noted.refuse(f"it asks for {name_of(function)} of a traced value")
            return result
        same = next((t for t in given if result is t or result is self._fakes.get(id(t))), None)
        if same is not None and not written:
            # `to` another type or device is one or none in every call: the graph is for these.
            if name_of(function) == "contiguous" or "memory_format" in kwargs:
                self._maybe_copied.add(storage_of(result))
            if name_of(function) == "contiguous" and self._is_input(same):
                # In a call with other strides it is not what the code was given.
                result = self.quietly(torch.Tensor.view, (same, same.shape), {})
                self.noted.keep(result, node)
                return result
            self.noted.graph.erase_node(node)
            return same
        self.noted.keep(result, node)
        for tensor in written:
            # Where the result is not what was written into, or has it inside, `keep` knows.
            place = self.noted.place_of(self._fakes.get(id(tensor), tensor))
            if place is not None:
                self.noted.replace(tensor, place)
        return result if same is None else same

    def _run(self, function: Any, args: Any, kwargs: Any, *, without_values: bool = False) -> Any:
        given = tensors_of((args, kwargs))
        if without_values or any(map(self._is_unknown, given)):
            args, kwargs = tree_map_only(Tensor, self._without_value, (args, kwargs))
            return self.quietly(function, args, kwargs)
        self._quiet = True
        try:
            return function(*args, **kwargs)
        finally:
            self._quiet = False

    def quietly(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call `function` on fake tensors without recording what it calls."""
        self._quiet = True
        try:
            with self._fake:
                return function(*args, **kwargs)
        except _OF_VALUES:
            self.noted.refuse("it branches on data, or makes as many results as it finds")
        finally:
            self._quiet = False

    def _is_input(self, tensor: Tensor) -> bool:
        place = self.noted.place_of(tensor)
        return isinstance(place, fx.Node) and place.op == "placeholder"

    def _is_unknown(self, tensor: Tensor) -> bool:
        return isinstance(tensor, FakeTensor) or id(tensor) in self._fakes

    def _without_value(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        known = self._fakes.get(id(tensor))
        if known is not None:
            return known
        made = self._copied(tensor)
        if _is_count(tensor) and isinstance(made, FakeTensor):
            made.constant = tensor  # Torch asks for it where it stands for a size.
        return made

    def _with_places(self, index: Any) -> Any:
        """`index` with the places of the flags that are set, where these are known."""
        items = index if isinstance(index, tuple) else (index,)
        if not any(map(self._is_known_flags, items)):
            return index
        set_at = lambda flags: self._make(torch.nonzero, (flags,), {"as_tuple": True})
        places = [set_at(item) if self._is_known_flags(item) else (item,) for item in items]
        return tuple(itertools.chain.from_iterable(places))

    def _is_known_flags(self, item: Any) -> bool:
        flags = isinstance(item, Tensor) and item.dtype is torch.bool and item.dim() > 0
        return flags and not self._is_unknown(item)

    def _with_size(self, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """`repeat_interleave` told how much it makes, where it is known how often it repeats."""
        repeats = kwargs["repeats"] if "repeats" in kwargs else args[min(1, len(args) - 1)]
        known = isinstance(repeats, Tensor) and not self._is_unknown(repeats) and repeats.dim() > 0
        if not known or kwargs.get("output_size") is not None or len(args) > 3:
            return kwargs
        return {**kwargs, "output_size": int(self._run(torch.sum, (repeats,), {}))}

    def _as_number(self, index: Any) -> Any:
        """A tensor that is one number, which follows from sizes alone, as that number."""
        if not isinstance(index, Tensor) or self._is_unknown(index) or not _is_count(index):
            return index
        return self._run(int, (index,), {})

    def _copied(self, tensor: Tensor) -> Tensor:
        """A tensor without values like this one; how torch makes it is not to be recorded."""
        before, self._quiet = self._quiet, True
        try:
            return self._fake.from_tensor(tensor)
        finally:
            self._quiet = before

    def _written(self, node: fx.Node, given: Sequence[Tensor]) -> list[Tensor]:
        """Those of `given` that `node` writes into."""
        found = [t for t in given if self.noted.place_of(t) in targets_of(node)]
        for tensor in found:
            self._check_write(tensor)
            place = self.noted.place_of(tensor)
            if place.op == "get_attr":
                # Every run writes into a copy of the constant.
                _, copy = copied(place, self.noted.root)
                node.replace_input_with(place, copy)
                self.noted.replace(tensor, copy)
        return found

    def _check_write(self, tensor: Tensor) -> None:
        """Refuse a write into what outlasts the call; forget the value of what is written to."""
        if storage_of(self._fakes.get(id(tensor), tensor)) in self._maybe_copied:
            self.noted.refuse("it writes into what it made contiguous, which may be a copy")
        if isinstance(tensor, FakeTensor):
            return
        if id(tensor) not in self._made:
            self.noted.refuse("its forward writes into a tensor that it keeps")
        if id(tensor) not in self._fakes:
            others = [
                t for t in self.noted.kept if t is not tensor and not isinstance(t, FakeTensor)
            ]
            if storage_of(tensor) in map(storage_of, others):
                self.noted.refuse("it writes a traced value into a tensor that it made")
            self._fakes[id(tensor)] = self._copied(tensor)

    def _assign(self, tensor: Tensor, key: Any, value: Any) -> None:
        """Record `tensor[key] = value` as a new value: graphs that write are hard to rewrite."""
        if self._is_there(tensor, key, value):
            return
        tracer = fx.proxy.GraphAppendingTracer(self.noted.graph)
        before, key, value = tree_map_only(
            Tensor, lambda t: fx.Proxy(self.noted.node_of(t), tracer), (tensor, key, value)
        )
        self._check_write(tensor)
        made = assigned(before, key, value, is_complex=tensor.is_complex())
        self.noted.replace(tensor, made)

    def _is_there(self, tensor: Tensor, key: Any, value: Any) -> bool:
        """Whether `value` is that part of the tensor: `x[key] += y` writes there, then assigns."""
        if not isinstance(value, Tensor) or storage_of(value) != storage_of(tensor):
            return False
        part = self._run(operator.getitem, (tensor, key), {})
        lie = lambda one: (storage_of(one), one.storage_offset(), one.shape, one.stride())
        return bool(lie(part) == lie(value))


def _is_count(tensor: Tensor) -> bool:
    kind = tensor.dtype
    return not (tensor.dim() or kind.is_floating_point or kind.is_complex or kind is torch.bool)


def _names_of(root: nn.Module, count: int) -> list[str]:
    """Names for `count` arguments in their order, those in `*args` and `**kwargs` among them."""
    signature = inspect.signature(root.forward)
    names, parameters = places(signature), signature.parameters.values()
    last = next((f"**{one.name}" for one in parameters if one.kind is one.VAR_KEYWORD), "more")
    if not is_open_ended(signature):
        return [*names, last][:count]
    rest = next(one.name for one in parameters if one.kind is one.VAR_POSITIONAL)
    return [*names, *(f"{rest}_{number}" for number in range(count - len(names)))][:count]


def _is_followed(module: nn.Module) -> bool:
    return not is_leaf(module) or is_spelled_out(module) or isinstance(module, Spread)
