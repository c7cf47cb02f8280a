"""Record `x[key] = value` as a new value, since graphs that write are hard to rewrite.

From then on the traced value stands for the new one. A slice that was taken before shares the old
one's memory and would miss the change: `traced.check_writes` refuses such code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ..modules.layers import as_elements
from ..nodes.shapes import is_size, node_of

_Place = tuple[int, Any]
"""A dimension, counted from the front or from the back, and the index or slice for it."""


_COMPLEX = {
    *("complex", "polar", "view_as_complex", "cfloat", "cdouble"),
    *("fft_fft", "fft_fft2", "fft_fftn", "fft_ifft", "fft_ifft2", "fft_ifftn"),
    *("fft_rfft", "fft_rfft2", "fft_rfftn"),
}
"""What makes complex numbers."""
_OF_ITS_KIND = {
    *("getitem", "select", "narrow", "clone", "contiguous", "detach", "conj", "resolve_conj"),
    *("zeros_like", "ones_like", "empty_like", "full_like"),
    *("new_zeros", "new_ones", "new_empty", "new_full", "zero_", "fill_"),
    *("reshape", "view", "flatten", "unflatten", "permute", "transpose", "movedim"),
    *("squeeze", "unsqueeze", "expand", "repeat", "roll", "flip", "fft_fftshift", "fft_ifftshift"),
    *("add", "sub", "mul", "div", "neg", "pow", "square", "exp", "where", "einsum", "matmul"),
    *("truediv", "iadd", "isub", "imul", "itruediv", "add_", "sub_", "mul_", "div_", "neg_"),
    *("stack", "cat", "pad", "slice_scatter", "select_scatter", "index_put", "sum", "mean"),
}
"""What makes complex numbers of such, and of whatever is beside them."""


def assigned(x: fx.Proxy, key: Any, value: Any, *, is_complex: bool = False) -> fx.Node:
    """Return the value of `x` after `x[key] = value`; `x` may be known to be complex."""
    keys = key if isinstance(key, tuple) else (key,)
    if len(keys) == 1 and _is_tensor(keys[0]):
        inside = x.new_full((), value) if _is_number(value) else value.to(x)
        result = _call(torch.index_put, x, [keys[0]], inside)
    else:
        put = _put_parts if is_complex or _is_complex(x.node) else _call
        result = _with(x, list(_places(keys)), value, put)
    result.node.meta["meant_in_place"] = True
    source = node_of(value)
    if source is not None and source.meta.get("meant_in_place") is True:
        # `x[key] *= 2` multiplies in place and then assigns the product to the place it is in.
        where = fx.node.map_aggregate(key, lambda one: getattr(one, "node", one))
        if _is_part(source.args[0], x.node, where):
            source.meta["meant_in_place"] = next(reversed(source.users))
    return result.node


def _is_part(value: Any, whole: fx.Node, key: Any) -> bool:
    taken = isinstance(value, fx.Node) and value.target is operator.getitem
    return taken and value.args == (whole, key)


def _places(keys: tuple[Any, ...]) -> Iterator[_Place]:
    if not all(key is Ellipsis or isinstance(key, slice) or _is_number(key) for key in keys):
        raise fx.proxy.TraceError("it assigns to elements of a traced value")
    front = next((place for place, key in enumerate(keys) if key is Ellipsis), len(keys))
    yield from enumerate(keys[:front])
    yield from ((place - len(keys), keys[place]) for place in range(front + 1, len(keys)))


def _with(x: Any, places: list[_Place], value: Any, put: Callable[..., fx.Proxy]) -> Any:
    """Return `x` with `value` at `places`; each place indexes the result of the one before it."""
    if not places:
        plain = _is_number(value)
        return _call(torch.full_like, x, value) if plain else _call(as_elements, value, x)
    (dim, key), *rest = places
    if not isinstance(key, slice):
        # An index removes its dimension, so later dimensions counted from the front move by one.
        rest = [(other - (dim >= 0 and other > dim), key) for other, key in rest]
        part = _with(x.select(dim, key), rest, value, put)
        return put(torch.select_scatter, x, part, dim, key)
    if key.start is None and key.stop is None and key.step is None:
        return _with(x, rest, value, put)
    around = (slice(None),) * (dim if dim >= 0 else -dim - 1)
    inner = x[(*around, key)] if dim >= 0 else x[(..., key, *around)]
    part = _with(inner, rest, value, put)
    step = 1 if key.step is None else key.step
    return put(torch.slice_scatter, x, part, dim, key.start, key.stop, step)


def _put_parts(function: Any, x: Any, part: Any, dim: int, *where: Any) -> fx.Proxy:
    """`function` of real and imaginary parts: of complex numbers torch gives it no gradients."""
    real = [_call(torch.view_as_real, _call(torch.resolve_conj, one)) for one in (x, part)]
    return _call(torch.view_as_complex, _call(function, *real, dim - (dim < 0), *where))


def _is_complex(node: fx.Node) -> bool:
    """Whether this is surely complex: made so, or a spectrum, or of one."""
    todo, seen = [node], set()
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        name = str(getattr(one.target, "__name__", one.target))
        types = [a for a in (*one.args, *one.kwargs.values()) if isinstance(a, torch.dtype)]
        if any(kind.is_complex for kind in types) or name in _COMPLEX:
            return True
        if name in _OF_ITS_KIND and not types:
            todo += one.all_input_nodes
    return False


def _call(function: Any, *args: Any) -> fx.Proxy:
    tracer = next(arg.tracer for arg in args if isinstance(arg, fx.Proxy))
    return tracer.create_proxy("call_function", function, args, {})


def _is_number(value: Any) -> bool:
    plain = isinstance(value, int | float | complex) and not isinstance(value, fx.Proxy)
    return plain or is_size(value)


def _is_tensor(key: Any) -> bool:
    return isinstance(key, Tensor) or (isinstance(key, fx.Proxy) and not is_size(key))
