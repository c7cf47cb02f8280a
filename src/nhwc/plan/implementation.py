"""An implementation: one way to compute a layer, from the graph's layer to the program.

Torch, oneDNN, cuDNN and the kernels of this package each offer some. An implementation says in
which layout it reads its images and in which it writes, and knows how to prepare the layer's
constants once. Ours can also be emitted into a program together with their neighbours: one call,
one arena, no conversions in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx

from ..formats import Format
from .specs import Layer

Run = Callable[..., Any]
"""Called with a layer's inputs, returns its result."""

Emit = Callable[..., Any]
"""Called with a builder, the prepared constants and the inputs' buffers; returns the result's."""


class Identifier(NamedTuple):
    """An implementation's name and layouts as text, for files, which can hold no function."""

    name: str
    reads: str | None
    writes: str | None


def _as_they_are(*constants: Any) -> Any:
    return constants


@dataclass(frozen=True, eq=False)
class Implementation:
    """A kernel for one layer, in one layout.

    `prepare` takes the layer's constants, if it has any. Without `emit` it returns the function
    that computes the layer; with `emit`, it returns what that is given: packed weights, say.
    `exact` if it sums just the products that the layer names; Winograd's kernels sum others, and
    those for transposed convolutions of few filters and for causal attention zeros besides, which
    infinity makes NaN.
    `copies` is how many times it holds its weights, not counting those that it reads in place.
    `free` if within a program it computes nothing, and only notes where data lies.
    `before` is the layer in front, if it computes that one as well.
    `moved` if within a program it is given tensors as they lie, `kernels.programs.moved.Moved`, and
    may return such; else it is given buffers.
    `compiles` if the first call of its kind compiles it.
    """

    name: str
    reads: Format | None
    writes: Format | None
    prepare: Callable[..., Any] = _as_they_are
    emit: Emit | None = None
    exact: bool = True
    copies: float = 1.0
    free: bool = False
    before: Layer | None = None
    moved: bool = False
    compiles: bool = False

    @property
    def ours(self) -> bool:
        """Whether it can share a program with its neighbours."""
        return self.emit is not None

    @property
    def label(self) -> str:
        return f"{self.name} {self.reads}" if self.reads else self.name

    @property
    def identifier(self) -> Identifier:
        reads, writes = (str(x) if x else None for x in (self.reads, self.writes))
        return Identifier(self.name, reads, writes)

    def layers(self, layer: Layer) -> tuple[Layer, ...]:
        """The layers that it computes where it serves `layer`, in their order."""
        return (layer,) if self.before is None else (self.before, layer)

    def inputs(self, layer: Layer) -> tuple[fx.Node, ...]:
        """The values that it reads where it serves `layer`."""
        if self.before is None:
            return layer.inputs
        return (*self.before.inputs, *layer.inputs[1:])


@dataclass(frozen=True)
class Timed:
    """An implementation, and how long one call of it takes on this machine.

    `turns` is how many calls that is the least of, `spread` by what share their median lies above.
    """

    implementation: Implementation
    seconds: float
    spread: float = 0.0
    turns: int = 0


Timings = dict[fx.Node, tuple[Timed, ...]]
"""The implementations that each layer may have, by its node."""

Choice = dict[fx.Node, Timed]
"""The implementation that each layer has, by its node."""
