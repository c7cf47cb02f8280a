"""Calls that are several simpler ones, for which there are kernels.

F.glu(x, dim)                  a * sigmoid(b), of the halves of x
x.norm(dim=1)                  sqrt(sum(x * x))
x.var(1)                       mean((x - mean(x)) ** 2), corrected
torch.add(x, y, alpha=2)       x + 2 * y
F.adaptive_max_pool2d(x, 1)    amax(x, (2, 3))
torch.max(x, y)                torch.maximum(x, y), where y is a tensor
x.amin(1)                      -amax(-x, 1)
x.logsumexp(1)                 m + log(sum(exp(x - m))), with m = amax(x, 1)
F.hardshrink(x)                0 where abs(x) <= 0.5, else x

The root of a variance stays: torch takes it before it rounds to float32, where a square overflows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from ..graph import filled, module_of
from ..graph.modules.leaves import computes_as
from .masks import compared, replaced
from .recording import Record, Seen
from .roots import called_name

Write = Callable[..., Any]
"""Computes the same of proxies, and of what the first tensor was seen to be; None if it cannot."""


def composed(record: Record, node: fx.Node) -> Write | None:
    """How `node` is said in simpler calls, if it is such a one, of numbers of float32 alone."""
    if not node.args or not _ASKED.get(called_name(node), lambda node: True)(node):
        return None
    values = [record.tensor(one) for one in (node, *node.all_input_nodes)]
    if any(one is None or one.dtype is not torch.float32 for one in values):
        return None
    return _of_module(node) if node.op == "call_module" else _BY_NAME.get(called_name(node))


def _of_module(node: fx.Node) -> Write | None:
    module: Any = module_of(node)
    for kind, (write, names) in _MODULES.items():
        if computes_as(module, kind):
            return partial(write, **{name: getattr(module, name) for name in names})
    if any(computes_as(module, kind) for kind in _POOLS) and not module.return_indices:
        return lambda seen, x: _adaptive_max(seen, x, module.output_size)
    return None


def write_composed(graph: fx.Graph, node: fx.Node, write: Write, seen: Seen) -> None:
    """Put simpler calls in the place of `node`, unless it is called in a way that `write` lacks."""
    tracer = fx.proxy.GraphAppendingTracer(graph)
    given = {key: value for key, value in node.kwargs.items() if value is not None}
    args: Any
    args, kwargs = filled((node.args, given), lambda one: fx.Proxy(one, tracer))
    with graph.inserting_before(node):
        try:
            made = write(seen, *args, **kwargs)
        except TypeError:
            return
    if made is not None:
        node.replace_all_uses_with(made.node)
        graph.erase_node(node)


def _glu(seen: Seen, x: Any, dim: int = -1) -> Any:
    halves = x.chunk(2, dim)
    return halves[0] * torch.sigmoid(halves[1])


def _adaptive_max(seen: Seen, x: Any, output_size: Any, return_indices: bool = False) -> Any:
    sides = output_size if isinstance(output_size, (tuple, list)) else (output_size,)
    if any(side != 1 for side in sides) or return_indices or len(seen.shape) < 3:
        return None
    return torch.amax(x, tuple(range(2, len(seen.shape))), True)


def _norm(
    seen: Seen, x: Any, p: Any = 2, dim: Any = None, keepdim: bool = False, **more: Any
) -> Any:
    plain = p in (2, None, "fro") and not more and _is_dims(dim)
    return torch.sqrt(torch.sum(x * x, dim, keepdim)) if plain else None


def _vector_norm(
    seen: Seen, x: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, **more: Any
) -> Any:
    return _norm(seen, x, ord, dim, keepdim, **more)


def _norm_of_algebra(
    seen: Seen, x: Any, ord: Any = None, dim: Any = None, *more: Any, **by: Any
) -> Any:
    # Of a matrix, which two dimensions make, 2 asks for the largest singular value.
    matrix = ord == 2 and isinstance(dim, (tuple, list)) and len(dim) == 2
    return None if matrix else _norm(seen, x, ord, dim, *more, **by)


def _variance(
    seen: Seen,
    x: Any,
    dim: Any,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> Any:
    if not _is_dims(dim) or type(dim) is bool or type(unbiased) is not bool:
        return None
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    count = math.prod(seen.shape[one] for one in dims)
    left = count - (int(unbiased) if correction is None else correction)
    if left <= 0:
        return None
    centred = x - torch.mean(x, dims, True)
    mean = torch.mean(centred * centred, dims, keepdim)
    return mean if left == count else mean * (count / left)


def _is_node(given: tuple[Any, ...]) -> bool:
    return len(given) == 1 and isinstance(given[0], fx.Node)


def _is_dims(dim: Any) -> bool:
    return type(dim) is int or (
        isinstance(dim, (tuple, list)) and len(dim) > 0 and all(type(one) is int for one in dim)
    )


def _sum(seen: Seen, x: Any, other: Any, *, alpha: float) -> Any:
    return x + other * alpha


def _difference(seen: Seen, x: Any, other: Any, *, alpha: float) -> Any:
    return x - other * alpha


def _quotient(seen: Seen, x: float, y: Any) -> Any:
    return torch.reciprocal(y) * x


def _at_least(seen: Seen, x: Any, min: float) -> Any:
    return torch.clamp(x, min=min)


def _at_most(seen: Seen, x: Any, max: float) -> Any:
    return torch.clamp(x, max=max)


def _larger(seen: Seen, x: Any, other: Any) -> Any:
    return torch.maximum(x, other)


def _smaller(seen: Seen, x: Any, other: Any) -> Any:
    return torch.minimum(x, other)


def _smallest(seen: Seen, x: Any, dim: Any = (), keepdim: bool = False) -> Any:
    return -torch.amax(-x, dim, keepdim)


def _between(seen: Seen, x: Any, end: Any, weight: float) -> Any:
    # Each end is met exactly, as torch does it.
    return x + (end - x) * weight if weight < 0.5 else end - (end - x) * (1 - weight)


def _hard_shrunk(seen: Seen, x: Any, lambd: float = 0.5) -> Any:
    return _call(replaced, x, _call(compared, torch.abs(x), lambd, "le"), 0.0, 1.0)


def _soft_shrunk(seen: Seen, x: Any, lambd: float = 0.5) -> Any:
    return x - torch.clamp(x, -lambd, lambd)


def _threshold(seen: Seen, x: Any, threshold: float, value: float, inplace: bool = False) -> Any:
    return _call(replaced, x, _call(compared, x, threshold, "le"), float(value), 1.0)


def _made_finite(seen: Seen, x: Any, nan: float | None = None) -> Any:
    most, number = torch.finfo(torch.float32).max, 0 if nan is None else nan
    if type(number) not in (int, float) or abs(number) > most:
        return None
    known = _call(replaced, x, _call(compared, x, x, "ne"), float(number), 1.0)
    return torch.clamp(known, -most, most)


def _log_sum_exp(seen: Seen, x: Any, dim: Any, keepdim: bool = False) -> Any:
    if 0 in seen.shape:
        return None
    # Of infinity nothing is subtracted: the result is infinite as well, and no NaN.
    top = torch.amax(x, dim, True)
    top = _call(replaced, top, _call(compared, torch.abs(top), math.inf, "eq"), 0.0, 1.0)
    rest = torch.log(torch.sum(torch.exp(x - top), dim, keepdim))
    return rest + (top if keepdim else torch.amax(top, dim))


def _reversed(seen: Seen, x: Any, other: Any) -> Any:
    return other - x


def _call(function: Callable[..., Any], x: Any, *args: Any) -> Any:
    """A call of one of our own functions, which is not looked into."""
    return x.tracer.create_proxy("call_function", function, (x, *args), {})


def _power(seen: Seen, x: Any, exponent: float) -> Any:
    return _POWERS[exponent](x)


_POWERS: dict[float, Callable[[Any], Any]] = {
    -2: lambda x: torch.reciprocal(x * x),
    -1: torch.reciprocal,
    -0.5: torch.rsqrt,
    0.5: torch.sqrt,
    3: lambda x: x * x * x,
    4: lambda x: (x * x) * (x * x),
}
_MODULES: dict[type[nn.Module], tuple[Write, tuple[str, ...]]] = {
    nn.GLU: (_glu, ("dim",)),
    nn.Hardshrink: (_hard_shrunk, ("lambd",)),
    nn.Softshrink: (_soft_shrunk, ("lambd",)),
    nn.Threshold: (_threshold, ("threshold", "value")),
}
"""By the kind of a module, with the names of its settings."""
_POOLS = (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
_BY_NAME: dict[str, Write] = {
    "glu": _glu,
    **dict.fromkeys((f"adaptive_max_pool{sides}d" for sides in (1, 2, 3)), _adaptive_max),
    "norm": _norm,
    "linalg_vector_norm": _vector_norm,
    "linalg_norm": _norm_of_algebra,
    "var": _variance,
    "add": _sum,
    "sub": _difference,
    "div": _quotient,
    "pow": _power,
    "clamp_min": _at_least,
    "clamp_max": _at_most,
    "max": _larger,
    "min": _smaller,
    "amin": _smallest,
    "lerp": _between,
    "hardshrink": _hard_shrunk,
    "softshrink": _soft_shrunk,
    **dict.fromkeys(("threshold", "_threshold"), _threshold),
    "nan_to_num": _made_finite,
    "logsumexp": _log_sum_exp,
    "rsub": _reversed,
}
"""By the name of a function or method, or the one name of its spellings."""
_ASKED: dict[str, Callable[[fx.Node], bool]] = {
    **dict.fromkeys(("add", "sub"), lambda node: type(node.kwargs.get("alpha")) in (int, float)),
    "div": lambda node: type(node.args[0]) in (int, float),
    **dict.fromkeys(("max", "min"), lambda node: _is_node(node.args[1:]) and not node.kwargs),
    **dict.fromkeys(("clamp_min", "clamp_max"), lambda node: len(node.all_input_nodes) == 1),
    "lerp": lambda node: len(node.args) == 3 and type(node.args[2]) in (int, float),
    "pow": lambda node: (
        len(node.args) == 2 and isinstance(node.args[0], fx.Node) and node.args[1] in _POWERS
    ),
}
"""What makes a composed call of one that has kernels as it is."""
