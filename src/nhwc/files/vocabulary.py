"""The functions, methods and layers that a saved graph may call, by name; others are refused.

All of them compute tensors from tensors: none reads files, imports, evaluates text, takes functions
or reaches into Python's own objects. Torch's are found by their schemas; the few of Python and of
nhwc are listed. A name that this torch lacks is unknown.
"""

from __future__ import annotations

import builtins
import collections
import inspect
import math
import operator
import re
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._jit_internal import boolean_dispatched

from ..graph.modules import layers
from ..graph.modules.layers import LAYERS
from . import schemas

_OPERATORS = """
    abs add and_ contains eq floordiv ge getitem gt iadd iand ifloordiv ilshift imatmul imod imul
    index invert ior ipow irshift isub itruediv ixor le lshift lt matmul mod mul ne neg not_ or_ pos
    pow rshift setitem sub truediv xor
"""

_BUILTINS = "abs bool float getattr int len max min pow round slice sum tuple"

_MATH = "ceil floor log2 prod sqrt trunc"

_PYTHON = "Size _assert as_tensor rsub tensor"
"""What `torch` makes or checks tensors and shapes with, and has no schema or documentation for."""

_CASTS = """
    bfloat16 bool byte cdouble cfloat char cpu double element_size float half int long ndimension
    nelement new_tensor norm numel short split stft type unique unique_consecutive values
"""
"""Methods that torch writes in Python, or that return numbers; `values` is a dict's, too."""

_MADE_FROM_NUMBERS = frozenset(("dtype", "device", "requires_grad"))
"""The keywords of what makes a tensor from numbers of Python's."""

ATTRIBUTES = frozenset(
    ["data", "device", "dtype", "H", "imag", "is_cuda", "mH", "mT", "ndim", "real", "shape", "T"]
)
"""The attributes that `getattr` may read."""

_ROOMS = (
    ("torch.fft", torch.fft),
    ("torch.special", torch.special),
    ("torch.linalg", torch.linalg),
)

_APART = (
    *("Lazy", "RNNBase", "RNNCellBase", "SyncBatchNorm"),
    *("CTCLoss", "EmbeddingBag", "FractionalMaxPool"),
)
"""Classes of torch.nn whose names begin like this are left out: lazy ones, base classes, one that
communicates with other processes, and those that index by numbers which torch does not check."""


@cache
def functions() -> dict[str, Callable[..., Any]]:
    """Every function a graph may call, by the name it has in a file."""
    found = {name: getattr(torch, name, None) for name in schemas.operator_names()}
    known = {f"torch.{name}": call for name, call in found.items() if callable(call)}
    known |= {f"torch.{name}": call for name, call in _composed(torch.functional)}
    known |= {f"torch.nn.functional.{name}": call for name, call in _composed(F)}
    for room, module in _ROOMS:
        prefix = room.removeprefix("torch.")
        for name, call in _public(module):
            if inspect.isbuiltin(call) and schemas.is_pure(f"{prefix}_{name}"):
                known[f"{room}.{name}"] = call
    listed = (
        ("torch", torch, _PYTHON),
        ("operator", operator, _OPERATORS),
        ("builtins", builtins, _BUILTINS),
        ("math", math, _MATH),
        ("collections", collections, "OrderedDict"),
        (
            "nhwc",
            layers,
            "as_elements assert_holds assert_keys assert_length assert_none assert_numbers "
            "assert_sizes assert_value",
        ),
    )
    return known | {
        f"{room}.{name}": getattr(module, name)
        for room, module, names in listed
        for name in names.split()
        if hasattr(module, name)
    }


@cache
def function_names() -> dict[Any, str]:
    """The name of each function; one that has two (`torch.concat`) gets either."""
    return {function: name for name, function in functions().items()}


def name_of(function: Any) -> str | None:
    """The name in a file of this function, or of an exported operator; None if it has none."""
    if isinstance(function, torch._ops.OpOverload):
        _, _, operator = function.name().partition("::")
        name, _, overload = operator.partition(".")
        known = function.namespace == "aten" and schemas.pure_overload(name, overload or "default")
        return f"aten.{name}.{overload or 'default'}" if known else None
    try:
        return function_names().get(function)
    except TypeError:
        return None


def function_of(name: str) -> Callable[..., Any] | None:
    """The function that a file calls `name`; None if the vocabulary has none."""
    exported = re.fullmatch(r"aten\.(\w+)\.(\w+)", name)
    if exported is not None:
        found: Callable[..., Any] | None = schemas.pure_overload(exported[1], exported[2])
        return found
    return functions().get(name)


@cache
def methods() -> frozenset[str]:
    """The tensor methods a graph may call."""
    pure = {name for name in schemas.operator_names() if schemas.is_method(name)}
    return frozenset(pure | {name for name in _CASTS.split() if hasattr(torch.Tensor, name)})


def keywords_of_function(name: str, function: Callable[..., Any]) -> frozenset[str]:
    """The keywords that `function`, which a file calls `name`, takes."""
    room, _, leaf = name.rpartition(".")
    if isinstance(function, torch._ops.OpOverload):
        return frozenset(a.name for a in function._schema.arguments)
    if room in ("operator", "builtins", "math", "collections"):
        return frozenset()
    if function in (torch.tensor, torch.as_tensor):
        return _MADE_FROM_NUMBERS
    if not inspect.isbuiltin(function) and inspect.isroutine(function):
        return _parameters(function)
    prefix = room.removeprefix("torch.") + "_" if room in dict(_ROOMS) else ""
    names = (prefix + leaf, function.__name__)
    return frozenset().union(*(schemas.keywords_of(n) for n in names if schemas.is_pure(n)))


def keywords_of_method(name: str) -> frozenset[str]:
    """The keywords that a tensor's method takes."""
    if name == "new_tensor":
        return _MADE_FROM_NUMBERS
    written_in_python = inspect.isfunction(getattr(torch.Tensor, name))
    known = _parameters(getattr(torch.Tensor, name)) if written_in_python else frozenset()
    return known | (schemas.keywords_of(name) if schemas.is_pure(name) else {"memory_format"})


def keywords_of_layer(layer: nn.Module) -> frozenset[str]:
    """The keywords that a call of the layer takes."""
    return _parameters(layer.forward)


@cache
def modules() -> dict[str, type[nn.Module]]:
    """Every module class a graph may hold, by name."""
    known = {f"nn.{name}": kind for name, kind in _public(nn) if _is_layer(kind)}
    return known | {f"nhwc.{layer.__name__}": layer for layer in LAYERS}


@cache
def module_names() -> dict[type, str]:
    return {kind: name for name, kind in modules().items()}


@cache
def enumerations() -> dict[str, dict[str, Any]]:
    """Torch's constants that graphs have as arguments: for each kind, by name."""
    kinds = {"dtype": torch.dtype, "memory_format": torch.memory_format}
    known = {
        kind: {str(value): value for value in vars(torch).values() if isinstance(value, of)}
        for kind, of in kinds.items()
    }
    return known | {"layout": {"torch.strided": torch.strided}}


def _public(room: ModuleType) -> Iterator[tuple[str, Any]]:
    return ((name, getattr(room, name)) for name in dir(room) if not name.startswith("_"))


def _composed(room: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The functions of `room` that are operators, or are written in Python and call those alone."""
    for name, call in _public(room):
        if not schemas.is_safe_name(name):
            continue
        if inspect.isbuiltin(call):
            if schemas.is_pure(call.__name__):
                yield name, call
        elif inspect.isfunction(call) and call.__module__ == room.__name__ and _takes_tensors(call):
            yield name, call


def _takes_tensors(function: Callable[..., Any]) -> bool:
    """Whether it takes tensors, and no function."""
    if function in boolean_dispatched:
        return True
    parameters = list(inspect.signature(function).parameters.values())
    if any("Callable" in str(p.annotation) for p in parameters):
        return False
    first = parameters[0]
    return first.annotation is first.empty or "Tensor" in str(first.annotation)


def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    dispatched: Any = boolean_dispatched.get(function)
    if dispatched is not None:
        return _parameters(dispatched["if_true"]) | _parameters(dispatched["if_false"])
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return frozenset(p.name for p in parameters if p.kind in named)


def _is_layer(kind: Any) -> bool:
    """Whether it is a layer of torch that needs neither a function nor a layer of the user's."""
    if not isinstance(kind, type) or not issubclass(kind, nn.Module) or kind is nn.Module:
        return False
    home = kind.__module__.removeprefix("torch.nn.modules.")
    if home in ("container", "transformer") or home == kind.__module__:
        return False
    if kind.__name__.startswith(_APART):
        return False
    parameters = inspect.signature(kind).parameters.values()
    return not any("Callable" in str(p.annotation) for p in parameters)
