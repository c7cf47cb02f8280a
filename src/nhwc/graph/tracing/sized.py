"""Capture a graph again for one set of input shapes, so that code may branch on sizes.

Every node runs on torch's fake tensors as it is recorded. These have shapes, types and devices, but
no values. So sizes are plain numbers while code is traced, and code that asks for values (`item`,
`nonzero`, a branch on a sum) is refused as in any other trace. Where it asks for those of inputs of
a few whole numbers, the graph is one for these numbers, too.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Collection, Iterator, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...errors import is_out_of_memory
from ...models.places import by_call
from ...models.preserve import mark_generators, preserved, undrawn
from ...operators.kinds import SHAPE_ATTRIBUTES
from ...verify import cloned, observe, verify
from ...verify.inputs import other_numbers
from ..effects.across import read_across
from ..effects.replaced import replaced
from ..effects.state import State
from ..modules.layers import Spread
from ..modules.leaves import replaced_in_torch
from ..nodes.arguments import name_placeholders
from ..nodes.counts import may_count, with_counts
from ..nodes.edit import attribute, called, filled
from ..nodes.seen import note_seen
from ..nodes.shapes import is_size
from ..report import Opaque
from .asked import asking
from .captured import graph_module, renamed, unwrap_layers
from .explained import explain
from .recorded import MOST, record_run, spare_writes
from .traced import Attribute, TracedParameter, TracedValue
from .tracer import Tracer

_Recorded = tuple[fx.Graph, dict[str, str]]
_SIZES = (int, float, bool, str, torch.dtype, torch.device, torch.layout, type(None))

_FILLED = ("new_zeros", "new_ones", "new_full")
"""Methods whose result depends only on the type and device of the tensor."""
_MOST_COUNTED = 3
"""The most inputs that a graph may be made for the numbers of; each choice of them is a run."""

_full = torch.full  # While a trace runs, `torch.full` is a wrapper.


def capture_sized(
    graph: fx.GraphModule, inputs: Sequence[Any]
) -> tuple[fx.GraphModule, dict[str, str]]:
    """Trace `graph` for inputs of these shapes; return also why parts stay opaque.

    The trace goes into the opaque parts that `graph` calls and into functions under
    `torch.fx.wrap`. The result shares every module and tensor with `graph`. It raises whatever
    stops the trace outside of such a part. Its `meta` says as `stopped` what ended a run with such
    parts open, if anything did.

    >>> from .captured import capture
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.ReLU())
    >>> sized, opaque = capture_sized(capture(net).module, [torch.ones(1, 2, 3)])
    >>> [str(node) for node in sized.graph.nodes], opaque
    (['input_1', '_0', '_1', 'output'], {})
    """
    replaced_code = replaced_in_torch()
    if replaced_code:
        raise fx.proxy.TraceError(replaced_code)
    with preserved(graph), torch.no_grad():
        # Run first: code may make tables for a size in its first call and keep them.
        before = State(graph)
        args, named = by_call(graph, cloned(inputs))
        graph(*args, **named)
        keeps = _is_changed(before)
        copy = _with_functions_open(renamed(graph.graph))
        root = fx.GraphModule(graph, copy, type(graph).__name__)
        stopped = ""
        with undrawn(), _without_nested():
            try:
                traced, opaque = _run_recorded(root, inputs)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                # Around parts that decide by values, what they return stays unknown.
                try:
                    traced, opaque = _traced(root, inputs)
                except Exception:
                    raise error from None
                stopped = explain(error)
        result = graph_module(traced, root, type(graph).__name__)
        result.meta["unset"] = root.meta.get("unset", ())
        result.meta["stopped"] = stopped
        result = unwrap_layers(result, root)
    if keeps and not _answers_others(graph, result, inputs):
        raise fx.proxy.TraceError("what its first call keeps depends on the numbers it is given")
    return result, opaque


def _run_recorded(root: fx.GraphModule, inputs: Sequence[Any]) -> _Recorded:
    """One run of `root`, recorded for the numbers of as few inputs as it takes."""
    try:
        return record_run(root, inputs)
    except fx.proxy.TraceError:
        places = tuple(may_count(inputs)[:_MOST_COUNTED])
        for_all = _recorded_for(root, inputs, places)
        if for_all is None:  # No fewer would help.
            raise
        fewer = (some for size in range(1, len(places)) for some in combinations(places, size))
        found = (_recorded_for(root, inputs, some) for some in fewer)
        return next(filter(None, found), for_all)


def _recorded_for(
    root: fx.GraphModule, inputs: Sequence[Any], places: Collection[int]
) -> _Recorded | None:
    """A run that is recorded for the numbers at these places; None if these are not enough."""
    if places:
        with contextlib.suppress(fx.proxy.TraceError):
            return record_run(root, inputs, places)
    return None


def _is_changed(state: State) -> bool:
    try:
        state.check()
    except fx.proxy.TraceError:
        return True
    return False


def _answers_others(graph: fx.GraphModule, sized: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether `sized` answers inputs with other numbers as `graph` does, if that takes them."""
    try:
        others = with_counts(sized.graph, inputs, other_numbers(inputs))
        truth = observe(graph, [others], wide=False)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return True
    return verify(truth, sized).passed


def _traced(root: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.Graph, dict[str, str]]:
    mark_generators()
    tracer = _Sized(root, inputs)
    traced = tracer.trace(root, tracer.fixed)
    tracer.check()
    spare_writes(traced, tracer.seen, tracer.quietly)
    name_placeholders(traced, root)
    return traced, tracer.opaque


def closed_functions(graph: fx.Graph) -> tuple[Opaque, ...]:
    """Report the functions that `torch.fx.wrap` hid from the trace; most of them ask for sizes."""
    targets = [node.target for node in graph.nodes if node.meta.get("is_wrapped")]
    names = dict.fromkeys(str(getattr(target, "__name__", target)) for target in targets)
    return tuple(Opaque(name, "function", "torch.fx.wrap keeps it closed") for name in names)


def _with_functions_open(graph: fx.Graph) -> fx.Graph:
    for node in graph.nodes:
        node.meta.pop("is_wrapped", None)
    return graph


def _without_nested() -> contextlib.AbstractContextManager[None]:
    """Refuse nested tensors: torch takes a traced value with a length for a list, and crashes."""

    def refuse(*_: Any, **__: Any) -> None:
        raise fx.proxy.TraceError("it makes a nested tensor")

    return replaced((torch._C._nested, "nested_tensor", refuse))  # type: ignore[attr-defined]


class _SizedParameter(TracedParameter):
    def __getattr__(self, key: str) -> Any:
        self._has(key, asking())
        return getattr(self.param, key) if key in SHAPE_ATTRIBUTES else _SizedAttribute(self, key)


class _Sized(Tracer):
    parameter_kind = _SizedParameter

    def __init__(self, root: fx.GraphModule, inputs: Sequence[Any]) -> None:
        super().__init__(State(root), read_across(root))
        self._fake = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        self._seen: dict[fx.Node, Any] = {}
        self._running = False
        args, named = by_call(root, inputs)
        given = inspect.signature(root.forward).bind(*args, **named)
        given.apply_defaults()
        self._given = {k: v for k, v in given.arguments.items() if isinstance(v, Tensor)}
        self.fixed = {k: v for k, v in given.arguments.items() if k not in self._given}
        if not _is_size(tuple(self.fixed.values())):
            raise fx.proxy.TraceError("its arguments are more than tensors and plain values")

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _SizedValue(node, self)

    def seen(self, node: fx.Node) -> Any:
        """Return the fake result of `node`; raise KeyError if there is none."""
        if node.op == "get_attr" and node not in self._seen:
            self._seen[node] = self.quietly(attribute, (self.root, str(node.target)), {})
        return self._seen[node]

    def create_proxy(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        if len(self.graph.nodes) > MOST:
            raise fx.proxy.TraceError(f"it makes more than {MOST} calls for these sizes")
        given, named, *rest = args
        if kind == "call_method" and target in _FILLED and not named:
            filled = self._constant(target, *given)
            if filled is not None:
                kind, target, given, named = "call_function", _full, (), filled
        result = super().create_proxy(kind, target, given, named, *rest, **kwargs)
        node = result.node
        try:
            self._seen[node] = self._run(node)
            note_seen(node, self._seen[node])
        except Exception:
            # Without a fake result the node is recorded, and so is everything computed from it.
            return result
        if _asks_for_sizes(node) and _is_size(self._seen[node]):
            self.graph.erase_node(node)
            return self._seen[node]
        return result

    def _constant(self, target: str, like: Any, *size: Any) -> dict[str, Any] | None:
        """Turn `like.new_zeros(*size)` into arguments of `torch.full`; None for unknown sizes."""
        value: Any = int(target == "new_ones")
        if target == "new_full" and len(size) == 2:
            size, value = size[0], size[1]
        elif len(size) == 1 and isinstance(size[0], tuple | list):
            size = tuple(size[0])
        if not _is_size((*size, value)) or self.kind_of(like) is not Tensor:
            return None
        seen = self.seen(like.node)
        return {"size": size, "fill_value": value, "dtype": seen.dtype, "device": seen.device}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        opened = isinstance(m, Spread) and module_qualified_name not in self.opaque
        return not opened and super().is_leaf_module(m, module_qualified_name)

    def call_module(self, m: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        if self._running:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        if self._running:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def iter(self, obj: Any) -> Iterator[Any]:
        if self.kind_of(obj) is None:
            return super().iter(obj)
        return iter([obj[index] for index in range(len(obj))])

    def kind_of(self, proxy: fx.Proxy) -> type | None:
        """Return the kind of a value with a length: Tensor, tuple or list; None if unknown."""
        try:
            value = self.seen(proxy.node)
        except KeyError:
            return None
        return next((kind for kind in (Tensor, tuple, list) if isinstance(value, kind)), None)

    def _may_be_none(self, node: fx.Node) -> bool:
        return node not in self._seen and super()._may_be_none(node)

    def _run(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._fake.from_tensor(self._given[str(node.target)])
        if node.target in self.opaque:
            raise KeyError(node)
        if node.op == "get_attr":
            return self.seen(node)
        args, kwargs = filled((node.args, node.kwargs), self.seen)
        if node.op == "call_module":
            return self.quietly(self.root.get_submodule(str(node.target)), args, kwargs)
        return self.quietly(called, (node, args, kwargs), {})

    def quietly(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Call `function` on fake tensors without recording its calls."""
        self._running = True
        try:
            with self._fake:
                return function(*args, **kwargs)
        finally:
            self._running = False


class _SizedValue(TracedValue):
    tracer: _Sized

    def __getattr__(self, key: str) -> Any:
        self._has(key, asking())
        if key in SHAPE_ATTRIBUTES and self.tracer.kind_of(self) is Tensor:
            return getattr(self.tracer.seen(self.node), key)
        return _SizedAttribute(self, key)

    def __len__(self) -> int:
        return len(self.tracer.seen(self.node)) if self.tracer.kind_of(self) else super().__len__()

    def _passes_for(self) -> type | None:
        return self.tracer.kind_of(self) or super()._passes_for()


class _SizedAttribute(_SizedValue, Attribute):
    pass


def _asks_for_sizes(node: fx.Node) -> bool:
    return node.target is torch.numel or is_size(node)


def _is_size(value: Any) -> bool:
    if type(value) in (tuple, torch.Size):
        return all(_is_size(item) for item in value)
    return isinstance(value, _SIZES)
