"""Activations that kernels apply before they store: how each is found, and what it is to whom.

One function for each question: what a module or a function of torch computes, and how torch, oneDNN
and our kernels are asked for it. A kernel that lacks an activation answers None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .. import kernels

if TYPE_CHECKING:
    from ..kernels.activations import Activation as Code


@dataclass(frozen=True)
class Activation:
    """An element-wise function at the end of a layer, by torch's name, with its numbers."""

    name: str
    numbers: tuple[float, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.name, *(f"{number:g}" for number in self.numbers)])


_RELU6 = Activation("hardtanh", (0.0, 6.0))

_MODULES: dict[type, Callable[[Any], Activation]] = {
    nn.ReLU: lambda m: Activation("relu"),
    nn.ReLU6: lambda m: _RELU6,
    nn.Hardtanh: lambda m: Activation("hardtanh", (float(m.min_val), float(m.max_val))),
    nn.Hardswish: lambda m: Activation("hardswish"),
    nn.Hardsigmoid: lambda m: Activation("hardsigmoid"),
    nn.SiLU: lambda m: Activation("silu"),
    nn.Sigmoid: lambda m: Activation("sigmoid"),
    nn.Tanh: lambda m: Activation("tanh"),
    nn.LeakyReLU: lambda m: Activation("leaky_relu", (float(m.negative_slope),)),
    nn.Mish: lambda m: Activation("mish"),
    nn.GELU: lambda m: Activation("gelu" if m.approximate == "none" else "gelu_tanh"),
}

_FUNCTIONS = {
    **{name: Activation(name) for name in ("relu", "hardswish", "hardsigmoid", "sigmoid")},
    **{name: Activation(name) for name in ("silu", "mish", "tanh")},
    "relu_": Activation("relu"),
    "relu6": _RELU6,
}

_IN_PLACE: dict[str, Callable[..., Tensor]] = {
    "relu": torch.relu_,
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
    "silu": lambda x: F.silu(x, inplace=True),
    "hardswish": lambda x: F.hardswish(x, inplace=True),
    "hardsigmoid": lambda x: F.hardsigmoid(x, inplace=True),
    "hardtanh": lambda x, low, high: F.hardtanh(x, low, high, inplace=True),
    "leaky_relu": lambda x, slope: F.leaky_relu(x, slope, inplace=True),
    "mish": lambda x: F.mish(x, inplace=True),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def of_module(module: nn.Module | None) -> Activation | None:
    """The activation that a module of torch computes.

    >>> of_module(nn.LeakyReLU(0.1))
    Activation(name='leaky_relu', numbers=(0.1,))
    """
    build = _MODULES.get(type(module))
    return build(module) if build else None


def of_function(node: fx.Node) -> Activation | None:
    """The activation that a call of a function or method of torch computes."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return _FUNCTIONS.get(name) if len(node.all_input_nodes) == 1 else None


def in_torch(activation: Activation | None) -> Callable[[Tensor], Tensor]:
    """The function that applies `activation` to a tensor nobody else reads, in place if it can."""
    if activation is None:
        return lambda x: x
    apply, numbers = _IN_PLACE[activation.name], activation.numbers
    return (lambda x: apply(x, *numbers)) if numbers else apply


def in_onednn(activation: Activation | None) -> tuple[str, list[Any], str] | None:
    """Name, numbers and algorithm as oneDNN's fused kernels want them.

    >>> in_onednn(Activation("gelu_tanh"))
    ('gelu', [], 'tanh')
    """
    if activation is None:
        return "none", [], ""
    if activation.name in ("gelu", "gelu_tanh"):
        return "gelu", [], "tanh" if activation.name == "gelu_tanh" else "none"
    if activation.name in ("relu", "sigmoid", "tanh", "hardswish", "hardtanh", "leaky_relu"):
        return activation.name, list(activation.numbers), ""
    return ("swish", [], "") if activation.name == "silu" else None


def in_ours(activation: Activation | None) -> tuple[Code, float] | None:
    """Our kernels' number for an activation, and its slope.

    >>> in_ours(Activation("hardtanh", (0.0, 6.0)))
    (<Activation.RELU6: 2>, 0.0)
    """
    codes = kernels.Activation
    if activation is None:
        return codes.NONE, 0.0
    if activation == _RELU6:
        return codes.RELU6, 0.0
    if activation.name.upper() not in codes.__members__:
        return None
    return codes[activation.name.upper()], (*activation.numbers, 0.0)[0]
