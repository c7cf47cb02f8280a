"""What torch's operators do with the tensors they are given, a function for each question.

Torch's schemas answer where they can: they mark the results that lie in an argument's memory, and
the arguments that are written to. The lists here hold what the schemas leave out.

Other rooms have lists that answer other questions: `graph.tracing.traced` what surely returns a
single tensor, `watch.effects` whose result has no format to keep and who copies because the code
asked for it, `passes._matching` which views are slices of channels.
"""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import torch
from torch import nn

from . import activations

_HOMES: tuple[str, ...] = ("torch", "torchvision", "nhwc", "_operator", "math", "builtins")
_HOMES_OF_LAYERS = ("torch.nn", "torch.ao.nn", "torchvision.ops", "nhwc")
"""The packages whose functions and layers these tables cover."""

SHAPE_METHODS = {"size", "dim", "numel", "is_floating_point", "get_device"}
SHAPE_ATTRIBUTES = {"shape", "ndim", "dtype", "device", "is_cuda", "requires_grad", "layout"}
"""They read a size, a type or a device, and no number."""
STRIDE_METHODS = {"stride", "is_contiguous", "storage_offset", "data_ptr"}
STRIDE_METHODS |= {"as_strided", "as_strided_copy", "as_strided_scatter"}
"""They read how a tensor lies in memory, or by strides that the code gives."""

MAYBE_COPIES = {"contiguous", "to", "reshape", "reshape_as", "flatten", "ravel"}
"""How a tensor lies in memory decides whether they return a copy, or it itself, or a view of it."""

PUTTING_IN = {torch.slice_scatter, torch.select_scatter}
"""They put the second tensor in the place of a part of the first: `x[key] = value` in a graph."""

_UNMARKED_VIEWS = {
    # Conversions, which return what already is as it should be.
    *("bfloat16", "bool", "byte", "cdouble", "cfloat", "chalf", "char", "conj_physical", "cpu"),
    *("cuda", "dequantize", "double", "float", "half", "int", "long", "short", "sum_to_size"),
    *("as_subclass", "as_tensor", "asarray", "numpy", "to_dense", "type", "type_as"),
    # Functions and layers that are made of views, or of nothing.
    *("atleast_1d", "atleast_2d", "atleast_3d", "broadcast_tensors", "cartesian_prod"),
    *("chain_matmul", "channel_shuffle", "channelshuffle", "einsum", "fromtokens", "identity"),
    *("fromframes", "toframes"),
    *("interleave", "pixel", "assert_sizes"),
    *("histogramdd", "meshgrid", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes"),
    *("unsafe_view", "align_as", "align_to", "refine_names", "rename"),
    "prod",  # torch.masked's, over no dimension
    # Python's own ways to ask for them.
    *("array", "get_data_attr", "getattr", "getitem", "pos"),
    # Layers that do nothing when they do not train; all whose name has "dropout" are such too.
    *("drop_block2d", "drop_block3d", "dropblock2d", "dropblock3d"),
    *("sequential", "stochastic_depth", "stochasticdepth"),
}

_WRITING_OPERATORS = {
    *(operator.iadd, operator.iand, operator.iconcat, operator.ifloordiv, operator.ilshift),
    *(operator.imatmul, operator.imod, operator.imul, operator.ior, operator.ipow),
    *(operator.irshift, operator.isub, operator.itruediv, operator.ixor),
    *(operator.setitem, operator.delitem),
}
_WRITING_METHODS = {f"__{function.__name__}__" for function in _WRITING_OPERATORS}

_ARITHMETIC = {
    "add": ("add", "add_", "iadd"),
    "sub": ("sub", "sub_", "isub"),
    "mul": ("mul", "mul_", "imul", "multiply"),
    "div": ("div", "div_", "truediv", "itruediv"),
}
_ARITHMETIC_OF = {spelt: name for name, spellings in _ARITHMETIC.items() for spelt in spellings}

_KEEPS_RANK = {
    *activations.NAMES,
    *("contiguous", "float", "to", "clone", "dropout", "elu", "linear", "softmax"),
    *("transpose", "permute", "pad", "interpolate"),
    *("adaptive_avg_pool2d", "avg_pool2d", "max_pool2d"),
}


def may_be_view(called: Any) -> bool:
    """Whether what is returned may lie in the memory of an argument, or be that argument itself.

    >>> may_be_view("Flatten"), may_be_view("relu"), may_be_view(operator.pos)
    (True, False, True)

    `called` is a function, a module, or the name of a method, function or layer. What comes from a
    package that this room does not know may be a view.
    """
    homes = _HOMES
    if isinstance(called, nn.Module):
        called = next(kind for kind in type(called).__mro__ if "forward" in vars(kind))
        homes = _HOMES_OF_LAYERS
    home = homes[0] if isinstance(called, str) else getattr(called, "__module__", None) or homes[0]
    if not any(home == known or home.startswith(f"{known}.") for known in homes):
        return True
    name = _plain(str(getattr(called, "__name__", called)))
    return "dropout" in name or name in _UNMARKED_VIEWS or name in _marked_views()


def writes_first(called: Any) -> bool:
    """Whether an operator writes into its first argument, by its name alone.

    >>> [writes_first(name) for name in ("add_", "__iadd__", "__and__", operator.setitem)]
    [True, True, False, True]

    Torch keeps to the underscore in all of its schemas. Python does not: `operator.and_` is `&`.
    """
    if getattr(called, "__module__", "") == operator.add.__module__:
        return called in _WRITING_OPERATORS
    name = str(getattr(called, "__name__", called))
    return name in _WRITING_METHODS or (name.endswith("_") and not name.endswith("__"))


def written_arguments(called: Any) -> dict[str, int]:
    """Names and places of the arguments that an overload of `torch.ops` writes to, by its schema.

    >>> written_arguments(torch.ops.aten.add_.Tensor), written_arguments(torch.add)
    ({'self': 0}, {})
    """
    if not isinstance(called, torch._ops.OpOverload):
        return {}
    arguments = called._schema.arguments
    return {one.name: place for place, one in enumerate(arguments) if one.is_write}


def returns_what_it_writes(called: Any) -> bool:
    """Whether what a writing operator returns is what it wrote into, as it is with torch's own.

    >>> returns_what_it_writes("add_"), returns_what_it_writes(operator.setitem)
    (True, False)

    An operator of others may return anything, or nothing; its schema says so.
    """
    if isinstance(called, torch._ops.OpOverloadPacket):
        return all(returns_what_it_writes(getattr(called, one)) for one in called.overloads())
    if isinstance(called, torch._ops.OpOverload):
        returns = called._schema.returns
        return len(returns) == 1 and returns[0].alias_info is not None
    return called not in (operator.setitem, "__setitem__")


def arithmetic_of(name: str) -> str | None:
    """`add`, `sub`, `mul` or `div`, if a function or method of this name is one of these.

    >>> arithmetic_of("itruediv"), arithmetic_of("relu")
    ('div', None)
    """
    return _ARITHMETIC_OF.get(name)


def without_writing(name: str) -> str:
    """The operator that returns what one of this name writes into its argument.

    >>> without_writing("neg_"), without_writing("neg"), without_writing("__neg__")
    ('neg', 'neg', '__neg__')
    """
    return name if name.endswith("__") else name.removesuffix("_")


def torchs_name(called: Any) -> str:
    """The name of a function or method, empty for an operator of others, whatever that does.

    >>> torchs_name(torch.relu), torchs_name("relu"), torchs_name(torch.ops.quantized.relu6)
    ('relu', 'relu', '')
    """
    packet = isinstance(called, torch._ops.OpOverloadPacket)
    foreign = packet and not called._qualified_op_name.startswith("aten::")
    return "" if foreign else str(getattr(called, "__name__", called))


@cache
def argument_names(called: Any) -> frozenset[str]:
    """The arguments that torch's operator of this name has in any of its forms.

    >>> [one in argument_names("quantize_per_channel") for one in ("axis", "dim")]
    [True, False]
    """
    name = str(getattr(called, "__name__", called))
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    return frozenset(one.name for schema in schemas for one in schema.arguments)


@cache
def is_pointwise(name: str) -> bool:
    """Whether each number of a result is made of those at its place, as torch's own tags say.

    >>> [is_pointwise(name) for name in ("atan2", "__rtruediv__", "mul_", "matmul")]
    [True, True, True, False]
    """
    plain = _plain(name)
    for spelt in (plain, plain[1:]):  # `__rsub__` has its operands swapped.
        known = arithmetic_of(spelt) or spelt
        if known in ("floordiv", "floor_divide"):
            return True
        packet = getattr(torch.ops.aten, known, None)
        if packet is not None:
            tags = [getattr(packet, overload).tags for overload in packet.overloads()]
            return any(torch.Tag.pointwise in one for one in tags)
    return False


def keeps_rank(name: str) -> bool:
    """Whether the result of this function or method surely has as many dimensions as its input.

    >>> keeps_rank("permute"), keeps_rank("flatten")
    (True, False)

    No schema says so, and a rank that is not sure is none.
    """
    return name in _KEEPS_RANK


def returns_several(called: Any) -> bool:
    """Whether an operator may return a tuple or a list, by its name alone.

    >>> [returns_several(name) for name in ("max", "chunk", "clone", torch.sort, "conv2d")]
    [True, True, False, True, False]
    """
    name = str(getattr(called, "__name__", called)).partition(".")[0]
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{name}")
    return any(
        len(schema.returns) > 1 or isinstance(schema.returns[0].type, torch.ListType)
        for schema in schemas
        if schema.returns
    )


def _plain(name: str) -> str:
    """The name without its overload, and without what says that it is private or writes."""
    return name.partition(".")[0].lower().strip("_")


@cache
def _marked_views() -> frozenset[str]:
    """The operators of torch that a schema says return a view, or may."""
    there = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    return frozenset(
        _plain(name.removeprefix("aten::"))
        for name in {full.partition(".")[0] for full in there}
        for schema in torch._C._jit_get_schemas_for_operator(name)
        if any(one.alias_info and not one.alias_info.is_write for one in schema.returns)
    )
