"""Trace a model; a module that cannot be traced stays one call, with the reason."""

from __future__ import annotations

import contextlib
import inspect
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx import _symbolic_trace as _fx
from torch.utils._pytree import tree_leaves

from ...errors import of_kind
from ...operators.kinds import returns_what_it_writes
from ..code.reached import OURS, TORCH
from ..effects.outside import Outside
from ..effects.replaced import replaced
from ..effects.state import State
from ..modules.leaves import IN_OWN_CALL, calls_otherwise, is_leaf, opaque_by_nature
from ..nodes.arguments import given_by_decorator
from ..nodes.memory import OF_OWN
from ..nodes.names import FOLLOWING, is_sayable, sayable_function
from ..nodes.results import is_lost, made_by
from ..nodes.shapes import is_size
from ..nodes.writes import may_be_view, written_into
from ..plain import all_plain, is_derived
from .asked import of_any_number
from .doubts import Doubts
from .explained import explain
from .functions import RECORDED, is_of_no_user, spell_out, typed_like, untraceable_functions
from .memos import forget_kept
from .modes import SEEDS, modes
from .nones import CERTAIN, argument_asked, arguments_asked, may_be_none, result_asked
from .of_buffers import Following
from .ranked import SureRanks
from .rearranging import einops_loaded
from .traced import (
    TracedParameter,
    TracedValue,
    check_writes,
)
from .transformers import is_spelled_out, spelled_out
from .written import Written

_TO_INPUT = ("__getitem__", "expand", "narrow", "repeat", "to", "type")
"""Methods by which tables, of positions say, get the size or the type of an input."""

_BY_PLACE = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}


class Tracer(fx.Tracer):
    """torch.fx's tracer, with each module that cannot be traced kept as one call.

    `opaque` maps the path of each such module to the reason. The code around a part of a model may
    give it what its annotations do not say: they are `believed` of the whole alone. `across` tells
    which parts read what others write.
    """

    parameter_kind = TracedParameter

    def __init__(
        self, state: State, across: dict[nn.Module, str], *, believed: bool = True
    ) -> None:
        wrapped = (*untraceable_functions(), *RECORDED)
        super().__init__(autowrap_functions=wrapped)
        self._autowrap_search += [torch, F, *filter(None, [einops_loaded()])]
        self.opaque: dict[str, str] = {}
        self.believed = believed
        self._state, self._across = state, across
        self._names: dict[Tensor, str] = {}
        self._written = Written()
        self._renamed: list[tuple[fx.Proxy, fx.Node]] = []
        self._modes = modes()
        self._refusal: fx.proxy.TraceError | None = None
        self._ends = False

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        # Torch lists its functions at the first request, which must come before fx wraps some.
        torch.overrides.get_overridable_functions()
        # A dictionary, since fx would search all parameters for each one that is used.
        self._names = {t: name for name, t in (*root.named_parameters(), *root.named_buffers())}
        self._following = Following(root.buffers())
        self._doubts = Doubts(root)
        self._outside = Outside(root)
        self.ranks = SureRanks(root, self.opaque)
        try:
            with spelled_out(root):
                asks, may_ask = arguments_asked(root, concrete_args or {})
                if asks:
                    raise fx.proxy.TraceError(asks)
                self._drawn = torch.get_rng_state()
                with self._seeing(), self._following:
                    graph = super().trace(root, concrete_args)
                self._check_drawn()
                if may_ask:
                    raise fx.proxy.TraceError(may_ask)
                self._doubts.check_written(root, 0)
                self._doubts.check_code(root)
            self._outside.check()
        finally:
            self._outside.put_back()
        for node in list(graph.nodes):
            if (node.op, node.target) == ("call_method", "type") and not node.users:
                graph.erase_node(node)
            if node.target in RECORDED:
                # fx would generate code that wraps a name with a dot in it, which fails.
                node.meta.pop("is_wrapped", None)
            if node.target is F.interpolate:
                spell_out(node)
        return graph

    def _seeing(self) -> contextlib.AbstractContextManager[None]:
        """See calls and parameters of modules as torch.fx does, but of this thread alone."""
        parameters: dict[str, fx.Proxy] = {}

        def seen(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            space = getattr(module.forward, "__globals__", {})
            patcher: Any = _fx.CURRENT_PATCHER
            _fx._autowrap_check(patcher, space, self._autowrap_function_ids)
            return self.call_module(module, partial(_fx._orig_module_call, module), args, kwargs)

        def seen_attribute(module: nn.Module, name: str) -> Any:
            return self.getattr(name, _fx._orig_module_getattr(module, name), parameters)

        places = (nn.Module, "__call__", seen), (nn.Module, "__getattr__", seen_attribute)
        return replaced(*places, *((Tensor, name, self._fitted(name)) for name in _TO_INPUT))

    def _fitted(self, name: str) -> Callable[..., Any]:
        """A method of tensors that is recorded if it is given a traced size, or the like."""
        own = getattr(Tensor, name)

        def method(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not _is_traced((*args, *kwargs.values())):
                return own(tensor, *args, **kwargs)
            if name == "__getitem__":
                part = self.create_proxy("call_function", operator.getitem, (tensor, *args), kwargs)
            else:
                part = self.create_proxy("call_method", name, (tensor, *args), kwargs)
            part.node.meta[OF_OWN] = name != "repeat"
            return part

        return method

    @property
    def asks_the_system(self) -> bool:
        """Whether the code may ask for what is another number at each call."""
        return self._outside.asks_the_system

    @property
    def root(self) -> nn.Module:
        return self._root

    @root.setter
    def root(self, root: nn.Module) -> None:
        # torch.fx has raised its flag for all threads, in which compiled models refuse to run then.
        flag: Any = _InThisThread()
        _fx._is_fx_tracing_flag, self._root = flag, root

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return TracedValue(node, self)

    def refuse(self, reason: str) -> NoReturn:
        """Stop the trace of the innermost module, even if its code catches errors."""
        raise self.refusal(reason)

    def refusal(self, reason: str) -> fx.proxy.TraceError:
        """Make an error that `check_refusal` raises again if the code catches it."""
        self._refusal = fx.proxy.TraceError(reason)
        return self._refusal

    def check_refusal(self) -> None:
        """Raise the last refusal again if the traced code caught it."""
        if self._refusal is not None:
            raise self._refusal

    def check(self, state: State | None = None) -> None:
        """Raise if the graph is not all that the traced code did, which began in this state."""
        self.check_refusal()
        check_writes(self.graph)
        self._written.check(self._names)
        state = state or self._state
        forget_kept(state.module)
        state.check()

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """Call a decorated `forward` by places and names, as callers do; notice when it ends.

        torch.fx would hand over an argument of `forward` as the `*args` of the decorator.
        """
        self._forget_attributes()
        called, args = self._called_by_place(root_fn, is_module, concrete_args)

        def ending(*given: Any) -> Any:
            result = called(*given)
            self._ends = True
            return result

        return ending, args

    def _called_by_place(
        self, root_fn: Any, is_module: bool, concrete_args: Any
    ) -> tuple[Any, list[Any]]:
        given = given_by_decorator(root_fn)
        if given:
            raise fx.proxy.TraceError(f"its forward is decorated by code that may give {given}")
        inner = inspect.unwrap(root_fn)
        signature = inspect.signature(inner)
        kinds = {one.kind for one in signature.parameters.values()}
        if inner is root_fn or kinds <= _BY_PLACE:
            return super().create_args_for_root(root_fn, is_module, concrete_args)
        if not kinds <= {*_BY_PLACE, inspect.Parameter.KEYWORD_ONLY}:
            raise fx.proxy.TraceError("its forward is decorated, and takes *args or **kwargs")
        _, args = super().create_args_for_root(inner, is_module, concrete_args)
        first = inner.__code__.co_argcount
        names = inner.__code__.co_varnames[first : len(args)]

        def forward(*given: Any) -> Any:
            return root_fn(*given[:first], **dict(zip(names, given[first:], strict=True)))

        return forward, args

    def _forget_attributes(self) -> None:
        """Take tensors that are neither parameters nor buffers for constants: no cast reaches them.

        torch.fx has collected them by now, to read them by the names of buffers.
        """
        for value in [one for one in self.tensor_attrs if isinstance(one, Tensor)]:
            del self.tensor_attrs[value]

    def to_bool(self, obj: fx.Proxy) -> bool:
        known = self.ranks.number(obj.node)
        if known is None:
            branches = f"it branches on {'a size or a type' if is_size(obj) else 'data'}"
            self.refuse(of_any_number(obj.node) or branches)
        return bool(known)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        count = self.ranks.length(obj.node)
        if count is None:
            self.refuse(_why_not_iterated(obj))
        return map(obj.__getitem__, range(count))

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        leaf = is_leaf(m) and not is_spelled_out(m)
        return module_qualified_name in self.opaque or leaf

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if self._is_passing(m):
            return self._through(m, forward, args, kwargs)
        self._check_running()
        path = self.path_of_module(m)
        self._doubts.check_watched(m)
        reason = opaque_by_nature(m) or self._across.get(m)
        if reason:
            self.opaque[path] = reason
        if path in self.opaque:
            self._check_left(m)
            self._doubts.note_written(m, (*args, *kwargs.values()))
        if not is_leaf(m):
            self._check_outside()
        if self.is_leaf_module(m, path):
            return super().call_module(m, forward, args, kwargs)
        depth, renamed = len(self.module_stack), len(self._renamed)
        before = next(iter(reversed(self.graph.nodes)), None)
        state, written = State(m), len(self._doubts.written)
        try:
            self._check_given(m, (*args, *kwargs.values()))
            result = super().call_module(m, forward, args, kwargs)
            self.check_refusal()
            self._doubts.check_written(m, written)
            self._doubts.check_code(m)
            self.check(state)
            self._outside.check()
            return result
        except Exception as error:
            self._outside.put_back()
            self._refusal = None
            self.ranks = SureRanks(self.root, self.opaque)
            state.restore()
            for value, node in reversed(self._renamed[renamed:]):
                value.node = node
            del self._renamed[renamed:]
            self._erase_after(before)
            while len(self.module_stack) > depth:
                self.module_stack.popitem()
            self._doubts.check_watched(m)
            self.opaque[path] = explain(error)
            self._check_left(m)
            self._doubts.note_written(m, (*args, *kwargs.values()))
            return super().call_module(m, forward, args, kwargs)

    def _check_left(self, part: nn.Module) -> None:
        """Refuse code that changes a part, and may put it back, around a call that stays a call."""
        changed = self._state.changed_in(part)
        if changed:
            self.refuse(f"it sets {changed} of a part that cannot be traced")

    def _check_outside(self) -> None:
        """Refuse code that has written outside of the modules what the part it calls may read."""
        try:
            self._outside.check()
        except fx.proxy.TraceError as error:
            self.refuse(str(error))

    def _through(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The result of a passing module, which may keep nothing: it has no path to stay under."""
        state = State(m)
        try:
            result = forward(*args, **kwargs)
            self._doubts.check_code(m)
            state.check()
        except Exception:
            state.restore()
            raise
        return result

    def _is_passing(self, m: nn.Module) -> bool:
        """Whether the code made this module for the call, of parts and tensors of the model."""
        installed = m in (self.submodule_paths or {})
        return not installed and all(t in self._names for t in (*m.parameters(), *m.buffers()))

    def _check_drawn(self) -> None:
        """Refuse code that seeds, also if it puts the generator back when it has drawn."""
        if not torch.equal(self._drawn, torch.get_rng_state()):
            # A graph does not seed, and would repeat what was drawn while it was traced.
            raise fx.proxy.TraceError(SEEDS)

    def _check_given(self, module: nn.Module, given: Iterable[Any]) -> None:
        """Refuse code that asks whether its argument is None if that is unknown."""
        if any(isinstance(x, fx.Proxy) and self._may_be_none(x.node) for x in given):
            asked = argument_asked(module)
            if asked:
                raise fx.proxy.TraceError(f"it asks whether its argument {asked} {CERTAIN}")

    def _check_running(self) -> None:
        """Refuse code of the current module that asks a question, by whatever way it is called."""
        frame: Any = sys._getframe(2)
        while frame.f_code not in (Tracer.call_module.__code__, Tracer.trace.__code__):
            users = not frame.f_code.co_filename.startswith((TORCH, OURS))
            if users and (reason := self._why_running(frame)):
                self.refuse(reason)
            frame = frame.f_back
            if frame is None:
                raise fx.proxy.TraceError("it runs code in threads of its own")

    def _why_running(self, frame: FrameType) -> str:
        """Say why this code must not be traced: it asks what a traced value cannot answer."""
        questions = self._doubts.running(frame)
        if questions.reason:
            return questions.reason.partition(" (")[0]
        for name in questions.none | questions.others:
            value: Any = frame.f_locals.get(name)
            kind = type(value)
            known = issubclass(kind, fx.proxy.Attribute) or not issubclass(kind, fx.Proxy)
            if not known and self._may_be_none(value.node):
                return f"it asks whether {name} {CERTAIN}"
        return ""

    def _check_none(self) -> None:
        """Refuse code that asks whether the result of the current call is None: it is unknown."""
        frame: Any = sys._getframe(2)
        while frame.f_code.co_filename.startswith((TORCH, OURS)):
            if frame.f_code is Tracer.trace.__code__:
                return  # Whoever asked for the trace wrote no line of the model.
            frame = frame.f_back
        if result_asked(frame):
            self.refuse("it asks whether the result of a part that cannot be traced is None")

    def _may_be_none(self, node: fx.Node) -> bool:
        """Whether `node` may return None, as far as is known."""
        return may_be_none(node, self.opaque, self._may_be_none)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        name = self._names.get(attr_val) if isinstance(attr_val, Tensor) else None
        if name is None:
            return attr_val
        if not isinstance(attr_val, nn.Parameter):
            # What the graph writes into a buffer is not there yet.
            written = self._written.writes_into(name)
            return self.create_proxy("get_attr", name, (), {}) if written else attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy(
                *("get_attr", name, (), {}),
                proxy_factory_fn=lambda node: self.parameter_kind(self, node, name, attr_val),
            )
        return parameter_proxy_cache[name]

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, fx.Proxy) and a.node._erased:
            raise fx.proxy.TraceError("a list or dict was filled by a part that cannot be traced")
        if is_derived(a):
            raise self._refusal_of(a)
        arguments = made_by(a)
        if arguments is not None:
            held: Any = super().create_arg(arguments)
            return self.create_node("call_function", type(a), *held)
        if is_lost(a):
            raise self._refusal_of(a)
        if self._ends and isinstance(a, torch.Size):
            # Arguments of calls may be plain tuples.
            return self.create_node("call_function", torch.Size, (tuple(a),), {})
        name = self._name_of(a) if isinstance(a, Tensor) else None
        try:
            result = self.create_node("get_attr", name, (), {}) if name else super().create_arg(a)
        except NotImplementedError:
            raise self._refusal_of(a) from None
        if isinstance(a, Tensor) and isinstance(result, fx.Node) and not a.is_inference():
            self._written.take(result, a)
        return result

    def _refusal_of(self, value: object) -> fx.proxy.TraceError:
        return fx.proxy.TraceError(f"it {'returns' if self._ends else 'hands on'} {of_kind(value)}")

    def _name_of(self, tensor: Tensor) -> str | None:
        """The name of a weight, a buffer, or what is computed of buffers; None for a constant."""
        name = self._names.get(self._following.itself(tensor))
        if name is None and tensor in self._following:
            name = self._names[tensor] = self.get_fresh_qualname(FOLLOWING)
            setattr(self.root, name, tensor)
        return name

    def create_proxy(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        if kind == "call_method" or (kind == "call_function" and is_of_no_user(target)):
            self._check_counted(args[0])
            args = (*map(all_plain, args[:2]), *args[2:])
        other = typed_like(args[0]) if kind == "call_method" and target == "type" else None
        if other is not None:
            target, args = "type_as", ((args[0][0], self.proxy(other)), *args[1:])
        target = sayable_function(target, args[0])
        unsayable = [key for key in args[1] if not (is_sayable(key) and key.isidentifier())]
        if unsayable:
            self.refuse(f"it passes an argument by the name {unsayable[0]!r}")
        if kind == "call_method" and not isinstance(args[0][0], (fx.Proxy, fx.Node, Tensor)):
            # The code of a graph would call a method of the number: `2.__rdiv__(x)`.
            self.refuse(f"it calls Tensor.{target} on {of_kind(args[0][0])}")
        if kind == "call_module" and calls_otherwise(self.root.get_submodule(target)):
            self.refuse(IN_OWN_CALL)
        self._check_running()
        result = super().create_proxy(kind, target, *args, **kwargs)
        if modes() != self._modes:
            self.refuse("it runs parts in another precision, or with gradients")
        self._check_drawn()
        if kind != "placeholder" and self._may_be_none(result.node):
            self._check_none()
        if kind == "call_module":
            result.node.meta["may_return_input"] = self._may_return_input(str(target))
        written = self._written_into(result.node)
        self._written.note(result.node, written)
        if isinstance(written, fx.Node) and returns_what_it_writes(target):
            # From now on the written value stands for the result of the write.
            for value in tree_leaves(args):
                if isinstance(value, fx.Proxy) and value.node is written:
                    self.rename(value, result.node)
        return result

    def _written_into(self, node: fx.Node) -> Any:
        """As `written_into`, which needs a finished graph to find a layer."""
        if node.op != "call_module":
            return written_into(node)
        layer = self.root.get_submodule(str(node.target))
        inplace = getattr(layer, "inplace", False) and str(node.target) not in self.opaque
        return node.args[0] if inplace and node.args else None

    def _check_counted(self, given: tuple[Any, ...]) -> None:
        """Refuse to count sizes in numpy's narrow types, which round where Python's do not."""
        narrow = [x for x in given if is_derived(x) and not isinstance(x, float | numpy.int64)]
        if narrow and any(map(is_size, given)):
            self.refuse(f"it counts in {of_kind(narrow[0])}")

    def _may_return_input(self, path: str) -> bool:
        """Whether the result of a module may share memory with its input."""
        module = self.root.get_submodule(path)
        if path in self.opaque or not is_leaf(module):
            return True
        return getattr(module, "inplace", False) or may_be_view(module)

    def rename(self, value: fx.Proxy, node: fx.Node) -> None:
        """Let `value` stand for `node` from now on; undone if the module cannot be traced."""
        self._renamed.append((value, value.node))
        value.node = node

    def _erase_after(self, before: fx.Node | None) -> None:
        for node in reversed(list(self.graph.nodes)):
            if node is before:
                return
            self.graph.erase_node(node)


def _why_not_iterated(value: fx.Proxy) -> str:
    if is_size(value):
        return "it goes through the sizes of a value whose number of dimensions is not known"
    return of_any_number(value.node) or "it loops over data"


def _is_traced(value: Any) -> bool:
    """Whether it is a traced value, or a tuple, list or slice of such."""
    if issubclass(type(value), fx.Proxy):
        return True
    if type(value) is slice:
        value = (value.start, value.stop, value.step)
    return isinstance(value, tuple | list) and any(map(_is_traced, value))


class _InThisThread:
    """True in the thread that made it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __bool__(self) -> bool:
        return threading.get_ident() == self._thread
