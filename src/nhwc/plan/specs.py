"""The planner's view of a graph: layers with a specification, which kernels can serve.

A layer is one call of one kernel: a convolution or linear with the bias, the residual addition
and the activation that follow it, or any other operator alone. Its specification says all that a
kernel's speed depends on, and names its entry in the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ..machine.host_memory import in_memory
from ..operators.activations import NamedActivation
from ..operators.windows import places


@dataclass(frozen=True)
class Convolution:
    """A convolution of signals, images or volumes, and what is done to its result before storing.

    `padding` is the zeros in front of each side, and behind it too unless `behind` says otherwise.
    If `held`, the frames beside a volume are not zeros but those at its ends.
    """

    input: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    bias: bool
    residual: bool
    activation: NamedActivation | None
    dtype: torch.dtype
    device: str
    behind: tuple[int, ...] | None = None
    held: bool = False

    @property
    def key(self) -> str:
        pads = _x(self.padding) + (f"-{_x(self.behind)}" if self.behind else "")
        pads += " held" if self.held else ""
        geometry = f"s{_x(self.stride)} p{pads} d{_x(self.dilation)} g{self.groups}"
        kind = f"conv{len(self.input) - 2}d"
        return f"{kind} {_x(self.input)} w{_x(self.weight)} {geometry} {_tail(self)}"

    @property
    def output(self) -> tuple[int, ...]:
        sizes = zip(self.padded, self.weight[2:], self.stride, self.dilation, strict=True)
        sides = (places(n, k, stride=s, dilation=d) for n, k, s, d in sizes)
        return (self.input[0], self.weight[0], *sides)

    @property
    def padded(self) -> tuple[int, ...]:
        """The sides of the input with the zeros beside it."""
        sides = zip(self.input[2:], self.padding, self.behind or self.padding, strict=True)
        return tuple(map(sum, sides))

    def of_padded(self) -> Convolution:
        """The same on an input that has the zeros beside it."""
        sides = self.padded
        none = (0,) * len(sides)
        more: dict[str, Any] = {"padding": none, "behind": None, "held": False}
        return replace(self, input=(*self.input[:2], *sides), **more)

    def as_image(self) -> Convolution:
        """The same convolution of signals, N, C, L, as one of images of one row each."""
        row: dict[str, Any] = {
            name: (0 if name in ("padding", "behind") else 1, *getattr(self, name))
            for name in ("stride", "padding", "dilation", "behind")
            if getattr(self, name) is not None
        }
        return replace(self, input=_with_row(self.input), weight=_with_row(self.weight), **row)


@dataclass(frozen=True)
class Linear:
    """A linear layer on an input of this shape."""

    input: tuple[int, ...]
    weight: tuple[int, ...]
    bias: bool
    residual: bool
    activation: NamedActivation | None
    dtype: torch.dtype
    device: str

    @property
    def key(self) -> str:
        return f"linear {_x(self.input)} w{_x(self.weight)} {_tail(self)}"

    @property
    def output(self) -> tuple[int, ...]:
        return (*self.input[:-1], self.weight[0])


@dataclass(frozen=True)
class Affine:
    """A batch norm no convolution took: a scale and a shift per channel, then an activation."""

    input: tuple[int, ...]
    residual: bool
    activation: NamedActivation | None
    dtype: torch.dtype
    device: str

    @property
    def key(self) -> str:
        return f"affine {_x(self.input)} {_tail(self)}"

    @property
    def output(self) -> tuple[int, ...]:
        return self.input

    def as_image(self) -> Affine:
        """The same of signals, N, C, L, as images of one row each."""
        return replace(self, input=_with_row(self.input))


@dataclass(frozen=True)
class OperatorSpec:
    """Any other operator: what is called, and how its arguments looked in the recorded run."""

    name: str
    arguments: str
    device: str

    @property
    def key(self) -> str:
        return f"{self.name} {self.arguments} {self.device}"


Weighted = Convolution | Linear | Affine
"""A layer with constants, which a kernel may want packed."""

Spec = Weighted | OperatorSpec


@dataclass(frozen=True)
class Layer:
    """One kernel call: the node it replaces, its specification and its tensor inputs.

    `op` is the dotted name of the module that holds its constants. They are looked up whenever a
    kernel is prepared: a graph that got new weights is bound again, not planned again.
    """

    spec: Spec
    node: fx.Node
    inputs: tuple[fx.Node, ...]
    op: str | None = None

    @property
    def name(self) -> str:
        """The layer's path in the user's model, or the name of its node."""
        return str(self.node.target) if self.node.op == "call_module" else self.node.name

    @property
    def given(self) -> list[fx.Node]:
        """The nodes among the arguments, in their order; one that is given twice comes twice."""
        return nodes_in((self.node.args, self.node.kwargs))


def nodes_in(value: Any) -> list[fx.Node]:
    """The nodes in lists, tuples and dicts of arguments, in their order."""
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)  # type: ignore[arg-type]
    return found


def constants_of(graph: fx.GraphModule, layer: Layer) -> tuple[Tensor, Tensor | None]:
    """Weight and bias, or scale and shift, of a weighted layer, detached and in memory."""
    op: Any = graph.get_submodule(layer.op or "")
    if isinstance(layer.spec, Affine):
        return _scale_and_shift(op)
    bias = op.bias
    return in_memory(op.weight.detach()), bias.detach() if isinstance(bias, Tensor) else None


def _scale_and_shift(norm: Any) -> tuple[Tensor, Tensor]:
    mean, variance = norm.running_mean.double(), norm.running_var.double()
    scale = torch.rsqrt(variance + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    shift = -mean * scale
    if norm.bias is not None:
        shift = shift + norm.bias.detach().double()
    dtype = norm.running_mean.dtype
    return scale.to(dtype), shift.to(dtype)


def _with_row(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:2], 1, *shape[2:])


def _x(numbers: tuple[int, ...]) -> str:
    return "x".join(map(str, numbers))


def _tail(spec: Weighted) -> str:
    words = ["bias" * getattr(spec, "bias", False), "residual" * spec.residual]
    words += [str(spec.activation or ""), str(spec.dtype).removeprefix("torch."), spec.device]
    return " ".join(word for word in words if word)
