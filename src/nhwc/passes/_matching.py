"""Small questions about nodes that several rewrites ask."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ..graph import attribute, bound, module_of
from ..graph.modules.layers import Fused
from ..graph.modules.leaves import unlike_class
from ..graph.modules.mended import Cat, ChannelNorm, SpelledNorm
from ..graph.nodes.edit import numbers_given
from ..graph.nodes.seen import seen_at
from ..operators.activations import of_call, of_module
from ..operators.kinds import arithmetic_of, torchs_name


def arithmetic(node: fx.Node) -> str | None:
    """`add`, `sub`, `mul` or `div`, if `node` is one of these, by torch's own name or Python's."""
    if node.op == "call_method":
        return arithmetic_of(str(node.target))
    name = str(getattr(node.target, "__name__", ""))
    known = node.target in (getattr(operator, name, None), getattr(torch, name, None))
    return arithmetic_of(name) if node.op == "call_function" and known else None


def is_addition(node: fx.Node) -> bool:
    """Whether `node` is a sum of two values."""
    both = len(node.args) == 2 and all(isinstance(value, fx.Node) for value in node.args)
    return arithmetic(node) == "add" and both and not node.kwargs


def activation_of(node: fx.Node) -> nn.Module | None:
    """Return an activation module that does the same as `node`; None if it is no activation."""
    module = module_of(node)
    if module is not None:
        return None if of_module(module) is None or unlike_class(module) else module
    return of_call(node)


class WithNumber(NamedTuple):
    """A node that computes of a value and a constant number, which the graph `held`."""

    node: fx.Node
    value: fx.Node
    held: fx.Node
    number: Tensor


def with_number(gm: fx.GraphModule, node: fx.Node | None, kind: str) -> WithNumber | None:
    """`node`, if it is a product, or a sum, of a value and a constant number."""
    if node is None or arithmetic(node) != kind or len(node.args) != 2 or node.kwargs:
        return None
    first, second = node.args
    for value, other in ((first, second), (second, first)):
        if isinstance(value, fx.Node) and isinstance(other, fx.Node) and other.op == "get_attr":
            number = attribute(gm, str(other.target))
            known = isinstance(number, Tensor) and not number.is_meta
            if known and number.numel() == 1 and number.ndim <= 1 and value is not other:
                return WithNumber(node, value, other, number.detach())
    return None


TO_LAST, TO_IMAGE = (0, 2, 3, 1), (0, 3, 1, 2)
"""The permutations from N, C, H, W to N, H, W, C and back."""


def permutation(node: fx.Node) -> tuple[int, ...] | None:
    """Return the order of dimensions that a call of `permute` asks for."""
    if node.target not in ("permute", torch.permute):
        return None
    dims = numbers_given(node) or node.kwargs.get("dims")
    if not isinstance(dims, (tuple, list)) or not all(isinstance(dim, int) for dim in dims):
        return None
    return tuple(dim % len(dims) for dim in dims)


_SPLITS = {torch.chunk, torch.split, torch.tensor_split, "chunk", "split", "tensor_split"}
_NARROWS = {torch.narrow, "narrow"}


def whole_of_slice(node: fx.Node) -> fx.Node | None:
    """The tensor of whose channels `node` is a slice, if it is one."""
    if node.target in _NARROWS:
        given = bound(node, ("input", "dim"))
        return given["input"] if given.get("dim") in (1, -3) else None
    if node.target is not operator.getitem:
        return None
    source, index = node.args
    if isinstance(source, fx.Node) and source.target in _SPLITS:
        given = bound(source, ("input", "sizes", "dim"))
        return given["input"] if given.get("dim", 0) in (1, -3) else None
    sliced = isinstance(index, tuple) and len(index) > 1 and isinstance(index[1], slice)
    return source if sliced and isinstance(source, fx.Node) else None


_OF_PIXELS = (
    *(nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.BatchNorm2d, Cat, ChannelNorm),
)


def is_made_of_pixels(node: object) -> bool:
    """Whether a convolution or a permutation to N, C, H, W made `node`.

    Nothing but pointwise operators and slices of channels may have followed.
    """
    todo, seen = [node], set()
    while todo:
        one = todo.pop()
        if not isinstance(one, fx.Node) or one in seen:
            continue
        seen.add(one)
        module = module_of(one)
        op = module.op if isinstance(module, Fused) else module
        if isinstance(op, _OF_PIXELS) or permutation(one) == TO_IMAGE:
            return True
        norm = isinstance(module, _BatchNorm | _DropoutNd | SpelledNorm)
        if norm or activation_of(one) is not None:
            todo += one.all_input_nodes[:1]
        elif arithmetic(one) is not None:
            todo += one.args
        else:
            todo.append(whole_of_slice(one))
    return False


def is_reshaped(node: fx.Node) -> bool:
    """Whether `node` is a view of four dimensions that something else was brought to."""
    return len(shape_given(node) or ()) == 4


def shape_given(node: fx.Node) -> list[Any] | None:
    """The sizes that `reshape` or `view` is given; None if they are not told one by one."""
    if node.op != "call_method" or node.target not in ("reshape", "view") or node.kwargs:
        return None
    shape = numbers_given(node)
    return list(shape) if isinstance(shape, list | tuple) else None


class Sampling(NamedTuple):
    """A bilinear `grid_sample`: of what, where, and how."""

    image: Any
    grid: Any
    padding_mode: str
    align_corners: bool


def sampling_of(node: fx.Node) -> Sampling | str:
    """What a call of `F.grid_sample` asks for, or why there is no NHWC form of it."""
    given = bound(node, ("input", "grid", "mode", "padding_mode", "align_corners"))
    mode, padding = given.get("mode", "bilinear"), given.get("padding_mode", "zeros")
    if mode != "bilinear" or padding not in ("zeros", "border"):
        return f"there is no NHWC form for mode={mode!r}, padding_mode={padding!r}"
    return Sampling(given["input"], given["grid"], padding, bool(given.get("align_corners")))


def is_item(node: fx.Node, number: int) -> bool:
    """Whether `node` takes this item of what a call returns."""
    return node.target is operator.getitem and bool(node.args[1] == number)


def only_user(node: fx.Node) -> fx.Node | None:
    """Return the node that uses `node` if there is exactly one."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def averaged(node: fx.Node | None) -> int | None:
    """The one dimension whose mean `node` takes of its first argument; None if it does else."""
    if node is None or node.target not in (torch.mean, "mean"):
        return None
    given = bound(node, ("input", "dim", "keepdim"))
    dim = given.get("dim")
    dim = dim[0] if isinstance(dim, list | tuple) and len(dim) == 1 else dim
    kept = given.get("keepdim") is True and len(given) == 3 and bool(node.args)
    return dim if kept and isinstance(dim, int) else None


def sum_with_number(node: fx.Node | None) -> tuple[fx.Node, float] | None:
    total = only_user(node) if node is not None else None
    if total is None or arithmetic(total) != "add" or len(total.args) != 2 or total.kwargs:
        return None
    number = next((one for one in total.args if type(one) in (int, float)), None)
    return None if number is None else (total, float(number))  # type: ignore[arg-type]


def beside(node: fx.Node | None, kind: str, operand: fx.Node) -> Any:
    """The other operand of a sum or a product; None if `node` is no such thing."""
    if node is None or arithmetic(node) != kind or len(node.args) != 2 or node.kwargs:
        return None
    first, second = node.args
    return second if first is operand else first if second is operand else None


_PRODUCTS = (torch.matmul, "matmul", torch.bmm, "bmm", "__matmul__")
_SOFTMAXES = (torch.softmax, F.softmax, "softmax")


def is_softmax(node: fx.Node) -> bool:
    """Whether `node` is a softmax over the last dimension."""
    module = module_of(node)
    if module is not None:
        return type(module) is nn.Softmax and module.dim == -1 and not unlike_class(module)
    if node.target not in _SOFTMAXES:
        return False
    given = bound(node, ("input", "dim"))
    # torch's own function hands on all its arguments.
    known = given.keys() <= {"input", "dim", "_stacklevel", "dtype"}
    seen = seen_at(given.get("input"))
    same = given.get("dtype") in (None, seen and seen.dtype)
    return given.get("dim") == -1 and known and same


def is_product(node: fx.Node) -> bool:
    """Whether `node` is a product of two tensors."""
    known = node.target in _PRODUCTS or torchs_name(node.target) == "matmul"
    both = len(node.args) == 2 and all(isinstance(one, fx.Node) for one in node.args)
    return node.op in ("call_function", "call_method") and known and both and not node.kwargs


def unscaled(node: Any) -> tuple[Any, float]:
    """A value before it was multiplied by a number, and this number."""
    kind = arithmetic(node) if is_own(node) else None
    if kind not in ("mul", "div") or len(node.args) != 2 or node.kwargs:
        return node, 1.0
    value, number = node.args
    if kind == "mul" and type(value) in (int, float):
        value, number = number, value
    if type(number) not in (int, float) or not number or not isinstance(value, fx.Node):
        return node, 1.0
    return value, float(number) if kind == "mul" else 1.0 / number


def is_own(node: Any) -> bool:
    """Whether `node` is a value that one other reads."""
    return isinstance(node, fx.Node) and only_user(node) is not None


def size_read(node: object) -> tuple[fx.Node, int] | None:
    """Return the value and the dimension if `node` reads a size: `x.size(1)`, `x.shape[1]`, ..."""
    if not isinstance(node, fx.Node):
        return None
    if node.op == "call_method" and node.target == "size" and len(node.args) == 2:
        source, dim = node.args
    elif node.target is operator.getitem:
        shape, dim = node.args
        if not isinstance(shape, fx.Node) or not _is_shape(shape):
            return None
        source = shape.args[0]
    else:
        return None
    if not isinstance(source, fx.Node) or not isinstance(dim, int):
        return None
    return source, dim % 4 if dim < 0 else dim


def _is_shape(node: fx.Node) -> bool:
    if node.op == "call_method" and node.target == "size":
        return len(node.args) == 1
    return node.target is getattr and node.args[1] == "shape"
