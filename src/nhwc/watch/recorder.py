"""Run a model once and record every operator call: formats, module, source line, time, copies."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch._ops import HigherOrderOperator
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

from ..formats import Format, format_of
from ..formats.source import CONVOLUTIONS
from ..formats.weights import convolution_weights
from ..models.modes import OperatorMode
from ..models.trees import has_strides, storage_of, tensors_of, weakly_held
from .calls import Call, CallSite, TensorSpec, described
from .effects import short_name
from .uncompiled import uncompiled

_NOT_THE_USERS = (
    str(Path(__file__).parents[1]) + os.sep,
    str(Path(torch.__file__).parent) + os.sep,
    "<",
)

_PYTHONS = sysconfig.get_paths()["stdlib"] + os.sep

_RUN_BY_US = tuple(str(Path(__file__).parents[1] / place) for place in ("cli", "_audit/running.py"))


class Recorder(contextlib.ExitStack):
    """A context that records the operator calls of this thread, and patches nothing.

    A function mode sees the calls as the user wrote them, composites whole; a dispatch mode sees
    the operators outside of such calls: those of the backward pass and of TorchScript.
    """

    def __init__(
        self,
        model: nn.Module | None,
        on_call: Callable[[Call], None] | None = None,
    ) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.current: int | None = None
        self.names = _module_names(model)
        self.sources: dict[int, int] = {}
        self._held: list[StorageWeakRef | None] = []
        self.sites: dict[int, CallSite] = {}
        self.on_call = on_call or self.calls.append
        self.made = 0
        self.failed = ""
        """The call that raised last, in words."""
        self.constants = set() if model is None else {storage_of(t) for t in _own_tensors(model)}

    def __enter__(self) -> Recorder:
        # A notebook lives on while the files of its models are edited.
        linecache.checkcache()
        self.enter_context(uncompiled())
        self.enter_context(_Functions(self))
        self.enter_context(_Kernels(self))
        return self

    def run(self, name: str, backward: bool, call: Callable[[], Any], arguments: object) -> Any:
        """Make one call and record it; calls nested inside belong to it."""
        index = self.made
        self.made += 1
        self.current = index
        before = _get_sequence_nr()
        specs = tuple(self._spec(tensor) for tensor in tensors_of(arguments))
        if name == "aten::convolution_backward":
            # A weight that autocast made, or code, is no image either.
            specs = (*specs[:2], replace(specs[2], source=None), *specs[3:])
        memories = {storage_of(tensor) for tensor in tensors_of(arguments)}
        node = torch._C._current_autograd_node() if backward else None
        try:
            with torch._C._profiler._RecordFunctionFast(f"nhwc::{index}"):
                result = call()
        except Exception as error:
            given = f"Inputs: {described(specs)}." if specs else "It got no tensor."
            site = self._site(node)
            self.failed = f"{name} raised {site.words}. {given}"
            tell(error, self.failed)
            # Code that catches it goes on, and numbers of calls are their places in the run.
            self.on_call(Call(index, name, backward, site, specs, (), moves_data=False))
            raise
        finally:
            self.current = None
        results = tensors_of(result)
        fresh = [tensor for tensor in results if storage_of(tensor) not in memories]
        for tensor in fresh:
            self.sources[storage_of(tensor)] = index
            self._held.append(weakly_held(tensor))
        leaves = _leaves(node)
        made = Call(
            index=index,
            operator=name,
            backward=backward,
            site=self._site(node),
            inputs=specs,
            outputs=tuple(
                self.spec(tensor, None)
                if has_strides(tensor) and tensor.shape in leaves
                else self._spec(tensor)
                for tensor in results
            ),
            moves_data=bool(fresh),
            asked=_asked(arguments),
        )
        for number in range(before, _get_sequence_nr()):
            self.sites[number] = made.site
        if backward and torch.is_grad_enabled():
            # A checkpoint computes anew here. A kernel's node was made before the mode saw it.
            self.sites.setdefault(before - 1, made.site)
        self.on_call(made)
        return result

    def told_of(self, error: Exception) -> str:
        """Which call raised `error`, in words; "" where another error left the run."""
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        return self.failed if self.failed in text or was_in_script(error) else ""

    def site_of(self, sequence: int) -> CallSite:
        """The line whose call made the node of this number in torch's sequence of them."""
        return self.sites.get(sequence, CallSite("", "", "", 0, ""))

    def _spec(self, tensor: Tensor) -> TensorSpec:
        memory = storage_of(tensor)
        own = isinstance(tensor, nn.Parameter) or memory in self.constants
        return self.spec(tensor, None if own else self.sources.get(memory, -1))

    def spec(self, tensor: Tensor, source: int | None) -> TensorSpec:
        """Describe a tensor that the call `source` made."""
        return TensorSpec(
            shape=() if tensor.is_nested else tuple(tensor.shape),
            strides=tuple(tensor.stride()) if has_strides(tensor) else (),
            dtype=str(tensor.dtype).removeprefix("torch."),
            format=format_of(tensor),
            bytes=0 if tensor.is_nested else tensor.numel() * tensor.element_size(),
            source=source,
        )

    def _site(self, node: Any) -> CallSite:
        # The backward of an operator is charged to the line that called it forward, unless code of
        # the user's runs in between: a hook.
        called = None if node is None else self.sites.get(node._sequence_nr())
        module, frame = "", None
        walk: FrameType | None = sys._getframe(2)
        while walk is not None and (not module or frame is None):
            code = walk.f_code
            if code.co_filename.startswith(_RUN_BY_US):
                break  # Whoever asked us to run the model wrote no line of it.
            if called is not None and code.co_name == "_engine_run_backward":
                break
            if frame is None and is_users(code.co_filename):
                frame = walk
            if not module and code.co_argcount and code.co_varnames[0] == "self":
                module = self.names.get(id(walk.f_locals.get("self")), "")
            walk = walk.f_back
        if called is not None and frame is None:
            return called
        name, _, kind = module.partition("\0")
        if frame is None:
            return CallSite(name, kind, "", 0, "")
        file, line = frame.f_code.co_filename, frame.f_lineno
        return CallSite(name, kind, file, line, linecache.getline(file, line).strip())


class _Functions(TorchFunctionMode):
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # A backward pass is no operator: the dispatch mode sees each of its operators.
        if self.recorder.current is not None or name in (*_QUERIES, "backward", "grad"):
            return func(*args, **kwargs)
        name = name_of(func)
        # The image and the weight of a convolution are known by their places.
        first = ("input", "weight") if short_name(name) in CONVOLUTIONS else ()
        in_order = {key: kwargs[key] for key in first if key in kwargs} | dict(kwargs)
        return self.recorder.run(name, False, lambda: func(*args, **kwargs), (args, in_order))


class _Kernels(OperatorMode):
    # The function mode sees `torch.cond` and its kin as one call.
    supports_higher_order_operators = True

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.recorder.current is not None or isinstance(func, HigherOrderOperator):
            return func(*args, **kwargs)
        backward = torch._C._current_autograd_node() is not None
        name = str(func.overloadpacket).replace(".", "::", 1)
        return self.recorder.run(name, backward, lambda: func(*args, **kwargs), (args, kwargs))


# Calls that only ask a tensor about itself are no operators.
_QUERIES = frozenset(
    [
        "__get__",
        "__set__",
        "size",
        "dim",
        "stride",
        "numel",
        "nelement",
        "element_size",
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "data_ptr",
        "is_nested",
        "storage_offset",
        "untyped_storage",
        "requires_grad_",
        "__len__",
        "__repr__",
        "__format__",
        "__hash__",
        "is_same_size",
        "get_device",
        "is_pinned",
        "ndimension",
        "has_names",
        "__bool__",
        "item",
        "tolist",
    ]
)


def name_of(func: Callable[..., Any]) -> str:
    """What a call of torch is named: an overload, as graphs of torch.export have it, has no part.

    >>> name_of(torch.cat), name_of(torch.ops.aten.cat.default)
    ('torch.cat', 'aten.cat')
    """
    called = getattr(func, "overloadpacket", func)
    return str(resolve_name(called) or getattr(func, "__name__", ""))


@cache
def is_users(file: str) -> bool:
    """Whether a user can be pointed to a source file: it is neither torch's, Python's nor ours.

    Nor is it einops', whose functions are operators to those who call them.
    """
    if package := re.search(r"-packages[/\\](\w+)", file):
        return package[1] != "einops" and not file.startswith(_NOT_THE_USERS)
    return not file.startswith((*_NOT_THE_USERS, _PYTHONS))


def was_in_script(error: Exception) -> bool:
    """Whether TorchScript's interpreter made `error` of one that was raised inside of it."""
    return isinstance(error, RuntimeError) and "TorchScript interpreter" in str(error)


def tell(error: Exception, text: str) -> None:
    """Add a line to what is printed of `error`, whose type and message others may rely on."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:  # Python 3.10 has no notes.
        error.args = (f"{error}\n{text}",)


def _leaves(node: Any) -> set[torch.Size]:
    """The shapes of the parameters whose gradients a node of the backward pass makes."""
    takers = () if node is None else node.next_functions
    leaves = (getattr(taker, "variable", None) for taker, _ in takers)
    return {leaf.shape for leaf in leaves if isinstance(leaf, nn.Parameter)}


_ASKED = {
    torch.contiguous_format: Format.CONTIGUOUS,
    torch.channels_last: Format.CHANNELS_LAST,
    torch.channels_last_3d: Format.CHANNELS_LAST_3D,
}


def _asked(arguments: object) -> Format | None:
    """The memory format that the caller named in any argument of any operator, or None."""
    named = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.memory_format)]
    return _ASKED.get(named[0]) if named else None


def _own_tensors(model: nn.Module) -> list[Tensor]:
    # Frozen TorchScript holds its weights as constants of the graph, not as parameters.
    weights = (weight.tensor for weight in convolution_weights(model))
    return [*model.parameters(), *model.buffers(), *weights]


def _module_names(model: nn.Module | None) -> dict[int, str]:
    if model is None:
        return {}
    return {id(m): f"{name}\0{type(m).__name__}" for name, m in model.named_modules()}
