"""The activations this library knows: a row for each says how torch and oneDNN spell it.

To add one, add a row here, and its code under the same name in `kernels/layers/curves.py` and,
for GPUs, in `plan/gpu/kernels.py`: our kernels have no activation that is not in this table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .spelled import ErfGELU, QuickGELU, SquaredReLU, TanhGELU


@dataclass(frozen=True)
class NamedActivation:
    """An element-wise function at the end of a layer, by torch's name, with its numbers.

    A number that was learned is a weight, and no part of its text: a plan serves others, too.
    """

    name: str
    numbers: tuple[float, ...] = ()

    def __str__(self) -> str:
        shown = () if self.name == "prelu" else self.numbers
        return " ".join([self.name, *(f"{number:g}" for number in shown)])


@dataclass(frozen=True)
class _Row:
    """`apply` works on a tensor nobody else reads, and writes into it if torch has such a form.

    `spellings` are the functions, and the names of methods, that `module` stands for; given the
    same arguments as one of them it computes the same. `numbers` are those of such a module, None
    if it computes another row's activation. `onednn` is the name and the algorithm that oneDNN's
    fused kernels take, with the numbers as they are; None where they have no such activation, or
    compute it otherwise: their relu and hardtanh turn NaN into 0, with SSE4.1 their sigmoid, too.
    """

    name: str
    module: type[nn.Module]
    spellings: tuple[Any, ...]
    apply: Callable[..., Tensor]
    onednn: tuple[str, str] | None = None
    numbers: Callable[[Any], tuple[float, ...] | None] = lambda module: ()


def _bounds(module: Any) -> tuple[float, ...]:
    return float(module.min_val), float(module.max_val)


def _single(module: Any) -> tuple[float, ...] | None:
    """The slope of a PReLU that has one for all channels, as it is now."""
    weight = module.weight
    return (float(weight.detach()),) if weight.numel() == 1 and not weight.is_meta else None


def _leaky_relu(x: Tensor, slope: float) -> Tensor:
    return F.leaky_relu(x, slope, inplace=True)


def _hardtanh(x: Tensor, low: float, high: float) -> Tensor:
    return F.hardtanh(x, low, high, inplace=True)


def _approximated(how: str) -> Callable[[Any], tuple[float, ...] | None]:
    return lambda module: () if module.approximate == how else None


def _usual(**settings: float) -> Callable[[Any], tuple[float, ...] | None]:
    """Nothing for a module that is set so; one that is set otherwise is none of the table's."""
    return lambda module: (
        () if all(getattr(module, name) == usual for name, usual in settings.items()) else None
    )


_TABLE = (
    _Row(
        "relu",
        nn.ReLU,
        (F.relu, torch.relu, torch.relu_, "relu", "relu_"),
        torch.relu_,
    ),
    _Row("hardtanh", nn.Hardtanh, (F.hardtanh, F.hardtanh_), _hardtanh, numbers=_bounds),
    _Row("hardtanh", nn.ReLU6, (F.relu6,), _hardtanh, numbers=_bounds),
    _Row(
        "leaky_relu",
        nn.LeakyReLU,
        (F.leaky_relu, F.leaky_relu_),
        _leaky_relu,
        ("leaky_relu", ""),
        lambda module: (float(module.negative_slope),),
    ),
    _Row("prelu", nn.PReLU, (), _leaky_relu, ("leaky_relu", ""), _single),
    _Row(
        "hardswish",
        nn.Hardswish,
        (F.hardswish,),
        lambda x: F.hardswish(x, inplace=True),
        ("hardswish", ""),
    ),
    _Row("hardsigmoid", nn.Hardsigmoid, (F.hardsigmoid,), lambda x: F.hardsigmoid(x, inplace=True)),
    _Row(
        "sigmoid",
        nn.Sigmoid,
        (torch.sigmoid, torch.sigmoid_, "sigmoid", "sigmoid_"),
        torch.sigmoid_,
    ),
    _Row("silu", nn.SiLU, (F.silu,), lambda x: F.silu(x, inplace=True), ("swish", "")),
    _Row("gelu", nn.GELU, (F.gelu,), F.gelu, ("gelu", "none"), _approximated("none")),
    _Row(
        "gelu_tanh",
        nn.GELU,
        (F.gelu,),
        lambda x: F.gelu(x, approximate="tanh"),
        ("gelu", "tanh"),
        _approximated("tanh"),
    ),
    _Row("erf_gelu", ErfGELU, (), ErfGELU()),
    _Row("tanh_gelu", TanhGELU, (), TanhGELU()),
    _Row("quick_gelu", QuickGELU, (), QuickGELU()),
    _Row("squared_relu", SquaredReLU, (), SquaredReLU()),
    _Row("tanh", nn.Tanh, (torch.tanh, torch.tanh_, "tanh", "tanh_"), torch.tanh_, ("tanh", "")),
    _Row("mish", nn.Mish, (F.mish,), lambda x: F.mish(x, inplace=True)),
    _Row("elu", nn.ELU, (F.elu, F.elu_), lambda x: F.elu(x, inplace=True), numbers=_usual(alpha=1)),
    _Row("elu", nn.CELU, (F.celu, torch.celu, torch.celu_), F.elu, numbers=_usual(alpha=1)),
    _Row("selu", nn.SELU, (F.selu, torch.selu, torch.selu_), lambda x: F.selu(x, inplace=True)),
    _Row("softplus", nn.Softplus, (F.softplus,), F.softplus, numbers=_usual(beta=1, threshold=20)),
)

MODULES = tuple(dict.fromkeys(row.module for row in _TABLE))
"""The modules that compute an activation of the table."""

FUNCTIONS: dict[Any, type[nn.Module]] = {
    spelling: row.module for row in _TABLE for spelling in row.spellings
}
"""The module that stands for a function of torch, or for a method by its name."""

NAMES = frozenset(getattr(function, "__name__", function) for function in FUNCTIONS)
"""The names of these functions and methods."""


def of_module(module: nn.Module | None) -> NamedActivation | None:
    """The activation that a module of torch computes.

    >>> str(of_module(nn.LeakyReLU(0.1))), str(of_module(nn.ReLU6())), of_module(nn.Linear(1, 1))
    ('leaky_relu 0.1', 'hardtanh 0 6', None)
    """
    for row in _TABLE:
        if type(module) is row.module:
            numbers = row.numbers(module)
            if numbers is not None:
                return NamedActivation(row.name, numbers)
    return None


def of_call(node: fx.Node) -> nn.Module | None:
    """A module that does the same as a call of a function or a method; None if it is none of the
    table's.

    >>> graph = fx.symbolic_trace(lambda x: F.leaky_relu(x, 0.2)).graph
    >>> of_call(next(iter(graph.find_nodes(op="call_function", target=F.leaky_relu))))
    LeakyReLU(negative_slope=0.2)
    """
    if node.op not in ("call_function", "call_method") or node.target not in FUNCTIONS:
        return None
    rest = node.args[1:]
    options = {k: v for k, v in node.kwargs.items() if k not in ("inplace", "input")}
    if any(isinstance(value, fx.Node) for value in (*rest, *options.values())):
        return None
    try:
        return FUNCTIONS[node.target](*rest, **options).eval()
    except (AssertionError, TypeError, ValueError):
        # The module refuses what the function takes: equal bounds of `hardtanh`, say.
        return None


def in_torch(activation: NamedActivation | None) -> Callable[[Tensor], Tensor]:
    """The function that applies `activation` to a tensor nobody else reads, in place if it can.

    >>> in_torch(NamedActivation("leaky_relu", (0.5,)))(torch.tensor([-2.0, 2.0]))
    tensor([-1.,  2.])
    """
    if activation is None:
        return lambda x: x
    apply, numbers = _row(activation.name).apply, activation.numbers
    return (lambda x: apply(x, *numbers)) if numbers else apply


def in_onednn(activation: NamedActivation | None) -> tuple[str, list[Any], str] | None:
    """Name, numbers and algorithm as oneDNN's fused kernels want them; None if torch must apply it.

    >>> in_onednn(NamedActivation("gelu_tanh")), in_onednn(None), in_onednn(NamedActivation("relu"))
    (('gelu', [], 'tanh'), ('none', [], ''), None)
    """
    if activation is None:
        return "none", [], ""
    spelt = _row(activation.name).onednn
    return None if spelt is None else (spelt[0], list(activation.numbers), spelt[1])


def _row(name: str) -> _Row:
    return next(row for row in _TABLE if row.name == name)
