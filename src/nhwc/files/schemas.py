"""Tell by schemas which of torch's operators compute tensors from tensors and numbers.

Torch describes each operator by a schema: the types of its arguments and results, and which of
them it writes to. A pure one takes and gives tensors, numbers, flags and words, writes to nothing
but its own first argument or `out`, and names no file. So the vocabulary of a file follows the
torch that is installed, and only the exceptions below are listed by hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F

_TYPES = frozenset(("Tensor", "number", "int", "float", "bool", "str", "Device", "Generator"))
"""The types of a pure operator's arguments; a list of one, or None, is allowed as well."""

_UNSAFE = frozenset(("filename", "pivots", "LU_pivots", "unsafe", "_random_samples"))
"""Arguments that name a file, or places in memory that torch does not check."""

_NOT = re.compile(
    # The memory of tensors: whose it is, where it lies, how much of it there is.
    r"set_|resize\w*|is_set_to|data_ptr|storage\w*|pin_memory|is_pinned|record_stream|as_strided_|"
    # Gradients, and facts about a tensor beside its values.
    r"\w*backward\w*|retain\w*|requires_grad\w*|is_leaf|output_nr|data|rename\w*|sym_\w*|"
    # Tensors that hold indices torch does not check, or bytes in a library's own form.
    r"\w*(sparse|csr|csc|bsr|bsc|coo|coalesce|indices_copy|nested|padded_tensor)\w*|"
    r"\w*(mkldnn|cudnn|miopen|fbgemm|vulkan|distributed)\w*|quantized_\w*|smm|sspaddmm|hspmm|"
    r"indices|c?(row|col)_indices|values_copy|sparse_dim|dense_dim|to_dense|"
    r"quantize_\w*|q_\w*|int_repr|"
    # Losses, poolings and bags that index by labels, samples or offsets torch does not check.
    r"ctc_loss|fractional_\w*|embedding_bag|"
    # Loops as long as a number of a tensor says, or as an argument does beside the shapes.
    r"special_\w*(polynomial|polygamma|zeta|multigammaln)\w*|polygamma_?|mvlgamma_?|"
    # Whole numbers divided by what torch does not check: the least by -1 ends the process.
    r"(gcd|lcm)_?"
)
"""Names of operators that are left out, by the property that the name tells."""

_PUBLIC = frozenset(("clamp_max", "clamp_min", "split_with_sizes"))
"""Operators that code calls, though torch does not document them."""

_NAME = re.compile(r"[a-z][a-z0-9_]*")

_ALIASES = frozenset(("input", "axis", "keepdims", "requires_grad", "dtype", "out", "as_tuple"))
"""Keywords that torch's Python takes in place of a schema's, or beside them."""


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
    """Whether this is the name of a public operator that files may call."""
    return bool(_NAME.fullmatch(name)) and not _NOT.fullmatch(name)


def is_public(name: str) -> bool:
    """Whether torch documents the operator, or the one without its `_`; or code calls it anyway."""
    names = {name, name.removesuffix("_")}
    rooms = (torch, torch.Tensor, F)
    # Since Python 3.13 None has a docstring, too, so it cannot stand for what is missing.
    found = [getattr(room, n) for room in rooms for n in names if hasattr(room, n)]
    return bool(names & _PUBLIC) or any(one.__doc__ for one in found)


def pure_overload(name: str, overload: str) -> Any:
    """`torch.ops.aten.NAME.OVERLOAD` if it is pure, and documented or one of torch's core; or None.

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
    """The keywords that the operator takes."""
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
    """Whether the operator may write there: into itself, as `add_` does, or into `out`."""
    return argument.name == schema.arguments[0].name or bool(argument.kwarg_only)


def _plain(argument: Any) -> bool:
    kind = str(argument.type)
    while (inner := re.fullmatch(r"(?:Optional|List)\[(.*)\]", kind)) is not None:
        kind = inner[1]
    return kind in _TYPES
