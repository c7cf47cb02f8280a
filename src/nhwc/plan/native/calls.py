"""The call that a node makes: what it was given, what it returned, and the step that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ...graph import bound, filled
from ...kernels.programs.builder import Buffer, Builder
from ...operators.kinds import torchs_name, without_writing
from ..implementation import Emit, Implementation
from ..recording import Record, Seen
from ..specs import Layer, nodes_in
from .weighted import ours
from .windows import Make


class OperatorCall:
    """The call that a node makes, with what the run on the example gave it and took from it."""

    def __init__(self, graph: fx.GraphModule, record: Record, layer: Layer) -> None:
        self.graph, self.record, self.layer, self.node = graph, record, layer, layer.node
        target = self.node.target
        self.module: Any = None
        if self.node.op == "call_module":
            self.module = graph.get_submodule(str(target))
        # Nobody else reads what a node of a plan writes into.
        self.name = without_writing(torchs_name(target))
        self.args: tuple[Any, ...] = tuple(filled(list(self.node.args), record.known))
        """What the node takes in order; what follows from shapes is known."""

    @property
    def out(self) -> Seen:
        found: Seen = self.record.values[self.node]
        return found

    def seen(self, index: int) -> Seen:
        """The tensor that is given in this place, counting tensors alone."""
        nodes = self.layer.given
        found: Seen = self.record.values[nodes[index]]
        return found

    def alone(self) -> bool:
        """Whether the node takes one tensor and no numbers."""
        flags = all(type(value) is bool for value in self.args[1:])
        named = self.node.kwargs.keys() <= {"input", "inplace"}
        return flags and named and len(self.node.all_input_nodes) == 1

    def two(self) -> bool:
        """Whether the node takes two tensors and nothing else."""
        nodes = nodes_in(self.node.args)
        plain = len(self.node.args) == 2 and not self.node.kwargs
        # A number that the model is given is a node as well, but no input of the layer.
        return plain and len(nodes) == 2 and {*nodes} <= {*self.layer.inputs}

    def places(self) -> list[int]:
        """Which input of the layer each argument is: one value may be given twice."""
        given = nodes_in(self.node.args)
        return [self.layer.inputs.index(one) for one in given if one in self.layer.inputs]

    def settings(self, names: Sequence[str]) -> dict[str, Any] | None:
        """What the node takes besides its first argument, where torch has them in this order.

        What follows from shapes are numbers; None if anything follows from the data.
        """
        given = bound(self.node, names)
        del given[names[0]]
        found: dict[str, Any] = filled(given, self.record.known)
        return None if nodes_in(found) else found

    def is_channels(self, dim: Any) -> bool:
        """Whether `dim` is that of the channels of images or volumes."""
        rank = len(self.out.shape)
        return rank in (4, 5) and dim in (1, 1 - rank)

    def steps(self, make: Callable[..., Any]) -> Implementation:
        """Add `make(*input views, output view)`, in the order of the node's own arguments."""
        shape = self.out.shape
        given = self.layer.given
        order = [node for node in given if node in self.layer.inputs]
        places = [self.layer.inputs.index(node) for node in order]

        def emit(builder: Builder, constants: None, *buffers: Buffer) -> Buffer:
            y = builder.buffer(shape)
            builder.add(make, *(buffers[i] for i in places), y)
            return y

        return computing(emit)

    def on_images(self, make: Make | None) -> Implementation | None:
        """Add what serves images alone."""
        images = len(self.seen(0).shape) == len(self.out.shape) == 4
        return self.steps(make) if make and images else None

    def on_pixels(self, make: Make) -> Implementation | None:
        """Add what treats each pixel alone, and so serves volumes as well."""
        volumes = len(self.seen(0).shape) == len(self.out.shape) == 5
        return self.steps(make) if volumes else self.on_images(make)


Lowered = Implementation | tuple[Implementation, ...] | None
"""Our kernel for a call, or several; None where there is none."""

Lower = Callable[[OperatorCall], Lowered]


def kernels_in(found: Lowered) -> tuple[Implementation, ...]:
    """The kernels that were found, in a tuple."""
    if isinstance(found, Implementation):
        return (found,)
    return found or ()


def computing(emit: Emit) -> Implementation:
    """A kernel that adds steps to a program."""
    return ours("nhwc", emit)


def noting(emit: Emit) -> Implementation:
    """A kernel that adds no step: it only notes where data lies."""
    return ours("nhwc", emit, free=True)
