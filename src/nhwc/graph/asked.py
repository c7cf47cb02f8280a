"""What code may ask of a traced value: it answers as a tensor would, or the trace stops there."""

from __future__ import annotations

import dis
import operator
import sys
from keyword import iskeyword
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, fx

TORCH = f"{Path(torch.__file__).parent}/"
OURS = f"{Path(__file__).parents[1]}/"

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


_ANSWERING = tuple(f"{OURS}graph/{file}.py" for file in ("asked", "traced", "sized"))
"""Where traced values answer."""

_ABC = ("<frozen abc>", f"{Path(operator.__file__).parent}/abc.py")
"""Where an abstract class asks of a value, among other things, what its real type can do."""


def _type_seen(proxy: Any) -> type:
    """What a traced value passes for. fx's own answers False to every `isinstance` of user code,
    and so takes one branch of it without a word."""
    frame: Any = asking()
    if frame.f_code.co_filename == _PARAMETER:
        if not issubclass(type(proxy), fx.proxy.ParameterProxy):
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


def asking() -> FrameType:
    """The frame that asks for an attribute, whichever of our methods it came through."""
    frame: Any = sys._getframe(2)
    while frame.f_code.co_filename in _ANSWERING:
        frame = frame.f_back
    return frame  # type: ignore[no-any-return]


_NOT_OF_TENSORS = {
    *(*dir(fx.proxy.ParameterProxy), *dir(fx.proxy.Attribute), "node", "tracer", "root", "attr"),
    *("param", "name", "__dict__"),
} - ({*dir(Tensor), *vars(Asked), "__getattr__"} - {"__dict__"})
"""What a traced value has for torch.fx and for us, and a tensor has not."""
