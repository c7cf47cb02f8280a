"""Which of torch's operators compute tensors from tensors and numbers, by their schemas.

Torch describes each operator by a schema: the types of its arguments and results, and which of
them it writes to. A pure one takes and gives tensors, numbers, flags and words, writes to nothing
but its own first argument or `out`, and names no file. So the vocabulary of a file follows the
torch that is installed, and no list of names is kept by hand but that of the exceptions below.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

_TYPES = frozenset(("Tensor", "number", "int", "float", "bool", "str", "Device", "Generator"))
"""What an argument of a pure operator may be, or a list of it, or None."""

_UNSAFE = frozenset(("filename", "pivots", "LU_pivots", "unsafe", "_random_samples"))
"""Arguments that name a file, or tell where in memory to go and are followed unchecked."""

_NOT = re.compile(
    # The memory of tensors: whose it is, where it lies, how much of it there is.
    r"set_|resize\w*|is_set_to|data_ptr|storage\w*|pin_memory|is_pinned|record_stream|as_strided_|"
    # Gradients, and what is known of a tensor beside its values.
    r"\w*backward\w*|retain\w*|requires_grad\w*|is_leaf|output_nr|data|rename\w*|sym_\w*|"
    # Tensors whose parts refer to one another unchecked, or whose bytes are a library's own.
    r"\w*(sparse|csr|csc|bsr|bsc|coo|coalesce|indices_copy|nested|padded_tensor)\w*|"
    r"\w*(mkldnn|cudnn|miopen|fbgemm|vulkan|distributed)\w*|quantized_\w*|smm|sspaddmm|hspmm|"
    r"indices|c?(row|col)_indices|values_copy|sparse_dim|dense_dim|to_dense|"
    r"quantize_\w*|q_\w*|int_repr|"
    # Labels and samples that are followed unchecked.
    r"ctc_loss|fractional_\w*"
)
"""Operators that are left out, by the property that their name tells."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")

_ALIASES = frozenset(("input", "axis", "keepdims", "requires_grad", "dtype", "out", "as_tuple"))
"""Keywords that torch's Python takes for those of a schema, or adds to them."""


@cache
def _overloads() -> dict[str, dict[str, Any]]:
    """The schemas of every operator of aten: name, then name of the overload."""
    known: dict[str, dict[str, Any]] = {}
    there = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    for name in sorted({name.partition(".")[0] for name in there}):
        for schema in torch._C._jit_get_schemas_for_operator(name):
            # TorchScript has operators of its own beside these, which print, save and import.
            full = f"{name}.{schema.overload_name}" if schema.overload_name else name
            if full in there:
                overload = schema.overload_name or "default"
                known.setdefault(name.removeprefix("aten::"), {})[overload] = schema
    return known


@cache
def is_pure(name: str) -> bool:
    """Whether the operator of this name, in all its overloads, computes and does nothing else.

    >>> is_pure("logical_xor"), is_pure("zero_"), is_pure("from_file"), is_pure("set_")
    (True, True, False, False)
    """
    known = _overloads().get(name)
    return known is not None and is_safe_name(name) and all(map(_computes, known.values()))


def is_safe_name(name: str) -> bool:
    """Whether an operator of this name is public, and none of those that are left out."""
    return bool(_NAME.fullmatch(name)) and not _NOT.fullmatch(name)


def is_public(name: str) -> bool:
    """Whether torch documents the operator, as a function, a method, or the one that writes."""
    names = {name, name.removesuffix("_")}
    rooms = (torch, torch.Tensor, F)
    return any(getattr(getattr(room, n, None), "__doc__", None) for room in rooms for n in names)


def pure_overload(name: str, overload: str) -> Any:
    """`torch.ops.aten.NAME.OVERLOAD`, if it is pure, and documented or one that all come down to.

    >>> pure_overload("add", "Tensor")
    <OpOverload(op='aten.add', overload='Tensor')>
    >>> pure_overload("from_file", "default") is None
    True
    """
    schema = _overloads().get(name, {}).get(overload)
    if schema is None or not is_safe_name(name) or not _computes(schema):
        return None
    found = getattr(getattr(torch.ops.aten, name), overload)
    return found if is_public(name) or torch.Tag.core in found.tags else None


def keywords_of(name: str) -> frozenset[str]:
    """What the operator may be given by name."""
    known = _overloads()[name].values()
    return _ALIASES | {a.name for schema in known for a in schema.arguments if a.name != "self"}


def is_method(name: str) -> bool:
    """Whether a tensor has a method of this name that is a pure operator on it."""
    if not is_pure(name) or not hasattr(torch.Tensor, name) or not is_public(name):
        return False
    return any(
        argument.name == "self"
        for schema in _overloads()[name].values()
        for argument in schema.arguments
    )


def operator_names() -> Iterator[str]:
    """The names of all pure operators that torch documents."""
    return (name for name in _overloads() if is_pure(name) and is_public(name))


def _computes(schema: Any) -> bool:
    return all(map(_plain, (*schema.arguments, *schema.returns))) and all(
        argument.name not in _UNSAFE and (not _is_written(argument) or _may_write(schema, argument))
        for argument in schema.arguments
    )


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _may_write(schema: Any, argument: Any) -> bool:
    """Into itself, as `add_`, or where the result is wanted."""
    return argument.name == schema.arguments[0].name or bool(argument.kwarg_only)


def _plain(argument: Any) -> bool:
    kind = str(argument.type)
    while (inner := re.fullmatch(r"(?:Optional|List)\[(.*)\]", kind)) is not None:
        kind = inner[1]
    return kind in _TYPES
