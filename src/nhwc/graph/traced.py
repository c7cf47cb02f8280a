"""What stands for a value while a model is traced.

It records what is done to it, and refuses what a graph could not repeat.
"""

from __future__ import annotations

import dis
import operator
import sys
from keyword import iskeyword
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from .assigned import assigned
from .shapes import is_size
from .writes import may_be_view, written_into

TORCH = f"{Path(torch.__file__).parent}/"
OURS = f"{Path(__file__).parents[1]}/"
CONSTANT = "_tensor_constant"
"""How torch.fx calls the tensors that code made itself."""

# The machinery itself asks what a traced value is, and takes no harm from a plain answer.
_MACHINERY = (
    OURS,
    *(f"{TORCH}{part}" for part in ("fx/", "nn/modules/module.py")),
    *(f"{TORCH}{part}" for part in ("utils/", "overrides.py")),
    # What these take for a tensor they hand to C++, which crashes on anything else.
    *(f"{TORCH}{part}" for part in ("autograd/", "_functorch/")),
)

_PARAMETER = f"{TORCH}nn/parameter.py"
"""Where nn.Parameter answers whether something is one."""


_ABC = ("<frozen abc>", f"{Path(operator.__file__).parent}/abc.py")
"""Where an abstract class asks of a value, among other things, what its real type can do."""


def _type_seen(proxy: Any) -> type:
    """What a traced value passes for. fx's own answers False to every `isinstance` of user code,
    and so takes one branch of it without a word."""
    frame: Any = _asking()
    if frame.f_code.co_filename == _PARAMETER:
        if type(proxy) is not TracedParameter:
            return type(proxy)
        frame = frame.f_back
    if frame.f_code.co_filename.startswith(_MACHINERY):
        return type(proxy)
    known: type | None = proxy._passes_for()
    if known is None:
        _refuse(proxy, "it asks for the type of a traced value")
    if frame.f_code.co_filename in _ABC:
        abstract = frame.f_locals["cls"]
        if issubclass(type(proxy), abstract) != issubclass(known, abstract):
            _refuse(proxy, "it asks for the type of a traced value")
    return known


def _refuse(proxy: Any, reason: str) -> NoReturn:
    """Stop the trace, also where the code around it catches every error."""
    tracer: Any = object.__getattribute__(proxy, "tracer")
    raise tracer.refusal(reason)


def _is_machinery(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_MACHINERY)


class Asked:
    """What code may ask of a value: a traced one answers as a tensor would, or stops the trace."""

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
        """Return where it has such an attribute; raise what a tensor would where it has none."""
        if _is_machinery(frame):
            return
        known = self._passes_for()
        if known is None and not _reads_attribute(frame):
            _refuse(self, "it asks what attributes a traced value has")
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
            if {"KeyError", "TypeError", "IndexError", "Exception"} & {*_asking().f_code.co_names}:
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
        # The message of `torch._assert` is made whether it is needed or not.
        if (
            not frame.f_code.co_filename.startswith(TORCH)
            and "_assert" not in frame.f_code.co_names
        ):
            _refuse(self, "it makes text of a traced value")
        return f"<traced {object.__getattribute__(self, 'node').name}>"

    def __dir__(self) -> list[str]:
        known = self._passes_for()
        return dir(known) if known else _refuse(self, "it asks what attributes a traced value has")

    def __len__(self) -> int:
        _refuse(self, "it uses the length of a traced value")

    def __contains__(self, item: object) -> bool:
        _refuse(self, "it looks for something in a traced value")

    def __copy__(self) -> NoReturn:
        _refuse(self, "it copies a traced value")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _refuse(self, "it copies a traced value")


_STATE = {
    *("grad", "grad_fn", "is_leaf", "names", "name", "output_nr", "retains_grad", "volatile"),
    *("_base", "_grad", "_grad_fn", "_backward_hooks", "_post_accumulate_grad_hooks", "_version"),
}
"""Attributes of a tensor that tell of its past, and most of which may be None."""


def _reads_attribute(frame: FrameType) -> bool:
    """Whether the code says `x.name`, and not `hasattr(x, name)` or `getattr(x, name, other)`."""
    operation = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    return operation in ("LOAD_ATTR", "LOAD_METHOD")


class Value(Asked, fx.Proxy):
    def __getattr__(self, key: str) -> Attribute:
        self._has(key, _asking())
        return Attribute(self, key)

    def _passes_for(self) -> type | None:
        return Tensor if surely_tensor(self.node, self.tracer) else None

    def __setitem__(self, key: Any, value: Any) -> None:
        tracer: Any = self.tracer
        tracer.rename(self, assigned(self, key, value))

    # fx takes `x += y` for `x = x + y`, which leaves out what else sees the change of x.
    def __iadd__(self, other: Any) -> Any:
        return _write_in_place(self, "add", other)

    def __isub__(self, other: Any) -> Any:
        return _write_in_place(self, "sub", other)

    def __imul__(self, other: Any) -> Any:
        return _write_in_place(self, "mul", other)

    def __itruediv__(self, other: Any) -> Any:
        return _write_in_place(self, "truediv", other)


def _asking() -> FrameType:
    """The frame that asks for an attribute, whichever of our methods it came through."""
    frame: Any = sys._getframe(2)
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return frame  # type: ignore[no-any-return]


def _write_in_place(value: fx.Proxy, operation: str, other: Any) -> fx.Proxy:
    if surely_tensor(value.node, value.tracer):
        method = "div_" if operation == "truediv" else f"{operation}_"
        return value.tracer.create_proxy("call_method", method, (value, other), {})
    function = getattr(operator, operation)
    result = value.tracer.create_proxy("call_function", function, (value, other), {})
    result.node.meta["meant_in_place"] = True
    return result


def check_writes(graph: fx.Graph) -> None:
    """Refuse a graph in which `x += y` was taken for `x + y` though x may be seen again."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        meant = node.meta.get("meant_in_place")
        if not meant or is_size(node.args[0]):
            continue
        if [*node.users] != [meant] and seen_later(node, order):
            raise fx.proxy.TraceError("it writes in place into a value that is used again")


def is_constant(node: fx.Node) -> bool:
    """Whether this is a tensor that code made, of nothing that was passed to it."""
    name = str(node.target).rpartition(".")[2]
    return node.op == "get_attr" and name.startswith(CONSTANT)


def seen_later(write: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether anything shows that `write` changed its first argument, its own result aside."""
    found, todo = {write}, [write.args[0]]
    while todo:
        node = todo.pop()
        if not isinstance(node, fx.Node) or node in found:
            continue
        if node.op in ("placeholder", "get_attr"):
            return True
        if any(order[user] > order[write] and not is_size(user) for user in node.users):
            return True
        found.add(node)
        todo += [*_shared(node), *(user for user in node.users if node in _shared(user))]
    return False


def _shared(node: fx.Node) -> list[fx.Node]:
    """Whose memory what `node` returns may lie in."""
    if is_size(node):
        return []
    if node.op == "call_module":
        return node.all_input_nodes if node.meta.get("may_return_input") else []
    name = str(getattr(node.target, "__name__", node.target))
    source = node.args[0] if may_be_view(name) and node.args else written_into(node)
    return [source] if isinstance(source, fx.Node) else []


class Attribute(Asked, fx.proxy.Attribute):
    def __getattr__(self, key: str) -> Attribute:
        self._has(key, _asking())
        return Attribute(self, key)

    def _passes_for(self) -> type | None:
        owner = object.__getattribute__(self, "root")._passes_for()
        key = object.__getattribute__(self, "attr")
        return _ATTRIBUTES.get(key) if owner is Tensor else None


_ATTRIBUTES: dict[str, type] = {
    "shape": torch.Size,
    "dtype": torch.dtype,
    "device": torch.device,
    "layout": torch.layout,
    **dict.fromkeys(("T", "H", "mT", "mH", "data", "real", "imag"), Tensor),
}


class TracedParameter(Asked, fx.proxy.ParameterProxy):
    """A parameter: recorded where it is used, known where only its shape is asked for."""

    _is_param = True  # what nn.Parameter asks of a tensor

    def __getattr__(self, key: str) -> Attribute:
        self._has(key, _asking())
        return Attribute(self, key)

    def size(self, dim: int | None = None) -> Any:
        return self.param.size() if dim is None else self.param.size(dim)

    def __len__(self) -> int:
        return len(self.param)

    def _passes_for(self) -> type | None:
        return nn.Parameter


_NOT_OF_TENSORS = {
    *(set(dir(TracedParameter)) | set(dir(Attribute)) | {"node", "tracer", "root", "attr"}),
    *("param", "name", "__dict__"),
} - ({*dir(Tensor), *vars(Asked), "__getattr__"} - {"__dict__"})
"""What a traced value has for torch.fx and for us, and a tensor has not."""


def surely_tensor(node: fx.Node, tracer: fx.proxy.TracerBase) -> bool:
    if node.op == "placeholder":
        return node.type in (Tensor, "Tensor", "torch.Tensor")
    if node.op == "call_module":
        module = tracer.root.get_submodule(str(node.target))  # type: ignore[attr-defined]
        if isinstance(module, nn.MultiheadAttention):
            return False  # a pair
        home = definer(type(module), "forward").__module__.removeprefix("torch.nn.modules.")
        return home in _TENSOR_LAYERS and not getattr(module, "return_indices", False)
    name = getattr(node.target, "__name__", node.target)
    if getattr(node.target, "__module__", "") == "_operator":
        operands = [value for value in node.args if isinstance(value, fx.Node)]
        arithmetic = name in ("add", "sub", "mul", "truediv", "matmul")
        return arithmetic and any(surely_tensor(value, tracer) for value in operands)
    return name in _TENSOR_RESULTS and node.op in ("call_function", "call_method")


_TENSOR_LAYERS = {
    *("conv", "linear", "batchnorm", "dropout", "normalization", "padding", "instancenorm"),
    *("activation", "flatten", "upsampling", "pixelshuffle", "pooling", "channelshuffle"),
}

_TENSOR_RESULTS = {
    *("conv1d", "conv2d", "conv3d", "linear", "relu", "relu_", "silu", "gelu", "hardtanh", "cat"),
    *("add_", "sub_", "mul_", "div_", "batch_norm", "permute", "transpose", "reshape", "view"),
    *("flatten", "contiguous", "mean", "sigmoid", "stack", "matmul", "interpolate", "pad"),
    *("adaptive_avg_pool2d", "avg_pool2d", "max_pool2d", "dropout", "layer_norm", "softmax"),
}


def definer(kind: type, name: str) -> type:
    """The class that gives `kind` its attribute `name`; `object` if none does."""
    return next((base for base in kind.__mro__ if name in vars(base)), object)
