"""Answer what code asks of a traced value as a tensor would, or stop the trace."""

from __future__ import annotations

import dis
import operator
import sys
from collections.abc import Iterator
from keyword import iskeyword
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

from ..code.asks import asserted, custom_function_asks, python_asks, torch_asks, unpacked
from ..code.questions import catches
from ..code.reached import OURS, TORCH
from ..modules.layers import RAISED, assert_holds
from ..nodes.shapes import is_size

# Code of torch and nhwc in these files gets the true type: it knows how to treat a traced value.
_MACHINERY = (
    OURS,
    *(f"{TORCH}{part}" for part in ("fx/", "nn/modules/module.py")),
    *(f"{TORCH}{part}" for part in ("utils/", "overrides.py")),
    # These hand whatever passes for a tensor to C++, which crashes if it is a traced value.
    *(f"{TORCH}{part}" for part in ("autograd/", "_functorch/")),
)

_PARAMETER = f"{TORCH}nn/parameter.py"
"""The file in which nn.Parameter answers `isinstance(x, nn.Parameter)`."""


_ANSWERING = tuple(f"{OURS}graph/tracing/{file}.py" for file in ("asked", "traced", "sized"))
"""The files with the methods by which traced values answer."""

_ABC = ("<frozen abc>", f"{Path(operator.__file__).parent}/abc.py")
"""The files in which abstract classes answer `isinstance`; they look at the real type as well."""


def _type_seen(proxy: Any) -> type:
    """Return the type that a traced value passes for in user code; refuse where that is unknown.

    fx's own value answers False to every `isinstance`, so user code silently takes one branch.
    """
    frame: Any = asking()
    if frame.f_code.co_filename == _PARAMETER:
        if not issubclass(type(proxy), fx.proxy.ParameterProxy):
            return type(proxy)
        frame = frame.f_back
    if frame.f_code.co_filename.startswith(_MACHINERY):
        return type(proxy)
    abstract = frame.f_code.co_filename in _ABC
    if not abstract and custom_function_asks(frame):
        # Its `forward` runs on traced values, and is recorded.
        return type(proxy)
    if not abstract and torch_asks(frame):
        # It wants a number or a tensor, sees neither, and is recorded.
        return type(proxy)
    known: type | None = proxy._passes_for()
    if known is None:
        _refuse(proxy, "it asks for the type of a traced value")
    if not abstract and not python_asks(frame):
        _refuse(proxy, "it hands a traced value to compiled code")
    if abstract:
        cls = frame.f_locals["cls"]
        if issubclass(type(proxy), cls) != issubclass(known, cls):
            _refuse(proxy, "it asks for the type of a traced value")
    return known


def _refuse(proxy: Any, reason: str) -> NoReturn:
    """Stop the trace, even if the user's code catches the error that this raises."""
    tracer: Any = object.__getattribute__(proxy, "tracer")
    raise tracer.refusal(reason)


def of_any_number(node: fx.Node) -> str:
    """Say why code cannot look into the `*args` or `**kwargs` of a forward; "" for other values."""
    whole = node.op == "placeholder" and str(node.target).startswith("*")
    return f"it looks into {node.target}, which may hold any number of values" if whole else ""


def _is_machinery(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_MACHINERY)


class Asked:
    """A traced value that answers user code as a tensor would, or else stops the trace."""

    def __getattribute__(self, key: str) -> Any:
        if key in _NOT_OF_TENSORS and not _is_machinery(sys._getframe(1)):
            return type(self).__getattr__(self, key)  # type: ignore[attr-defined]
        return object.__getattribute__(self, key)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        return _type_seen(self)

    def _passes_for(self) -> type | None:
        return None

    def _has(self, key: str, frame: FrameType) -> None:
        """Check that the value has this attribute; raise what a tensor raises if it does not."""
        if _is_machinery(frame):
            return
        known = self._passes_for()
        if known is None and not _reads_attribute(frame):
            why = of_any_number(object.__getattribute__(self, "node")) if key == "keys" else ""
            _refuse(self, why or "it asks what attributes a traced value has")
        may_catch = {"AttributeError", "Exception", "BaseException"} & {*frame.f_code.co_names}
        if known is None and may_catch and not hasattr(Tensor, key):
            _refuse(self, "it asks what attributes a traced value has")
        if key in _STATE or key.startswith("__"):
            _refuse(self, f"it reads {key} of a traced value")
        if known is not None and not hasattr(known, key):
            raise AttributeError(f"'{known.__name__}' object has no attribute '{key}'")
        if not key.isascii() or iskeyword(key) or not key.isidentifier():
            _refuse(self, f"it reads an attribute that is called {key!r}")

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str) and type(key) is str:
            if self._passes_for() is Tensor:
                return torch.empty(1)[key]  # type: ignore[index]
            if {"KeyError", "TypeError", "IndexError", "Exception"} & {*asking().f_code.co_names}:
                _refuse(self, "it tries whether a traced value has a key")
        return super().__getitem__(key)  # type: ignore[misc]

    def __setattr__(self, key: str, value: Any) -> None:
        if not _is_machinery(sys._getframe(1)):
            _refuse(self, f"it sets {key} of a traced value")
        object.__setattr__(self, key, value)

    def __delattr__(self, key: str) -> None:
        _refuse(self, f"it deletes {key} of a traced value")

    def __repr__(self) -> str:
        return self._as_text(sys._getframe(1))

    def __str__(self) -> str:
        return self._as_text(sys._getframe(1))

    def __format__(self, spec: str) -> str:
        return self._as_text(sys._getframe(1))

    def _as_text(self, frame: FrameType) -> str:
        # Code makes the message of `torch._assert` even if the assertion holds.
        if (
            not frame.f_code.co_filename.startswith(TORCH)
            and "_assert" not in frame.f_code.co_names
        ):
            _refuse(self, "it makes text of a traced value")
        return f"<traced {object.__getattribute__(self, 'node').name}>"

    def __dir__(self) -> list[str]:
        known = self._passes_for()
        return dir(known) if known else _refuse(self, "it asks what attributes a traced value has")

    def __hash__(self) -> int:
        # A tensor is a key by its identity; a size or a dtype would be found by its value.
        known = self._passes_for()
        if not _is_machinery(sys._getframe(1)) and not (known and issubclass(known, Tensor)):
            _refuse(self, "it looks for a traced value in a dict or a set")
        return object.__hash__(self)

    def __bool__(self) -> bool:
        tracer: Any = object.__getattribute__(self, "tracer")
        node = object.__getattribute__(self, "node")
        found = asserted(asking()) if is_size(node) else None
        known = found and found.error in (AssertionError, *RAISED.values())
        if not (found and known) or _may_be_caught(asking()):
            return tracer.to_bool(self)  # type: ignore[no-any-return]
        called, operands, holds = node.target, fx.node.map_arg(node.args, tracer.proxy), self
        if called is operator.mod:
            called, operands = operator.ne, (self, 0)
        if not found.truth:  # TorchScript has no `not_`.
            if called not in _OPPOSITE:
                return tracer.to_bool(self)  # type: ignore[no-any-return]
            called = _OPPOSITE[called]
        if called is not node.target:
            holds = tracer.create_proxy("call_function", called, operands, {})
        if found.error is AssertionError:
            tracer.create_proxy("call_function", torch._assert, (holds, found.text), {})
        else:
            said = (holds, found.error.__name__, found.text)
            tracer.create_proxy("call_function", assert_holds, said, {})
        return found.truth

    def __iter__(self) -> Iterator[Any]:
        tracer: Any = object.__getattribute__(self, "tracer")
        count = unpacked(asking())
        if count is None:
            return tracer.iter(self)  # type: ignore[no-any-return]
        node = object.__getattribute__(self, "node")
        if tracer.ranks.length(node) != count and not _may_be_caught(asking()):
            _assert_count(tracer, self, count)
        tracer.ranks.note_unpacked(node, count)
        return map(self.__getitem__, range(count))

    def __len__(self) -> int:
        tracer: Any = object.__getattribute__(self, "tracer")
        count: int | None = tracer.ranks.length(object.__getattribute__(self, "node"))
        return _refuse(self, "it uses the length of a traced value") if count is None else count

    def __contains__(self, item: object) -> bool:
        _refuse(self, "it looks for something in a traced value")

    def __copy__(self) -> NoReturn:
        _refuse(self, "it copies a traced value")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _refuse(self, "it copies a traced value")


def _assert_count(tracer: Any, values: Any, count: int) -> None:
    """Have the graph refuse an input that has more or fewer sizes, or parts, than code unpacks.

    What layers return is refused by these, and passes look for those who read it.
    """
    node: Any = values.node
    while is_size(node) or _is_parted(node):
        node = node.args[0] if node.args else None
    if node is not values.node and isinstance(node, fx.Node) and node.op == "placeholder":
        length = _count(tracer, values)
        holds = tracer.create_proxy("call_function", operator.eq, (length, count), {})
        said = (holds, ValueError.__name__, f"expected {count} values to unpack")
        tracer.create_proxy("call_function", assert_holds, said, {})


def _count(tracer: Any, values: Any) -> Any:
    """How many they are: a call that torch.fx can trace again, where they are a tensor's sizes."""
    node: Any = values.node
    whole = node.target is getattr or (node.target == "size" and len(node.args) == 1)
    if whole and not node.kwargs:
        return tracer.create_proxy("call_method", "dim", (tracer.proxy(node.args[0]),), {})
    return tracer.create_proxy("call_function", len, (values,), {})


def _is_parted(node: object) -> bool:
    called = node.target if isinstance(node, fx.Node) else None
    return getattr(called, "__name__", called) in _PARTED


_PARTED = ("chunk", "split", "split_with_sizes", "tensor_split", "unbind")
"""What returns as many values as its argument says, or has sizes for."""


def _may_be_caught(frame: FrameType | None) -> bool:
    """Whether code of the model around this frame catches errors: it would go on, not a graph."""
    while frame is not None and not _begins_trace(frame.f_code):
        users = not frame.f_code.co_filename.startswith((TORCH, OURS))
        if users and catches(frame.f_code):
            return True
        frame = frame.f_back
    return False


def _begins_trace(code: CodeType) -> bool:
    return code.co_filename == f"{OURS}graph/tracing/tracer.py" and code.co_name == "trace"


_OPPOSITE: dict[Any, Any] = {operator.eq: operator.ne, operator.lt: operator.ge}
_OPPOSITE |= {operator.gt: operator.le}
_OPPOSITE |= {other: one for one, other in _OPPOSITE.items()}

_STATE = {
    *("grad", "grad_fn", "is_leaf", "names", "name", "output_nr", "retains_grad", "volatile"),
    *("_base", "_grad", "_grad_fn", "_backward_hooks", "_post_accumulate_grad_hooks", "_version"),
}
"""Attributes of a tensor that depend on its past; a graph does not know them."""


def _reads_attribute(frame: FrameType) -> bool:
    """Whether the code says `x.name`, as opposed to `hasattr(x, name)` or `getattr(x, name, y)`."""
    operation = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return operation in ("LOAD_ATTR", "LOAD_METHOD")


def asking() -> FrameType:
    """Return the frame that asks, skipping the frames of traced values' own methods."""
    frame: Any = sys._getframe(2)
    while frame.f_code.co_filename in _ANSWERING:
        frame = frame.f_back
    return frame  # type: ignore[no-any-return]


_NOT_OF_TENSORS = {
    *(*dir(fx.proxy.ParameterProxy), *dir(fx.proxy.Attribute), "node", "tracer", "root", "attr"),
    *("param", "name", "__dict__"),
} - ({*dir(Tensor), *vars(Asked), "__getattr__"} - {"__dict__"})
"""Attributes of a traced value that serve torch.fx and nhwc, and that a tensor does not have."""
