"""Layers of our kernels as programs: one call, one arena, one tape for all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import fx

from .. import kernels
from ..formats import Format
from .implementation import Choice, Implementation, Run
from .recording import Record
from .specs import Layer

if TYPE_CHECKING:
    from ..kernels.programs.pool import Pool


Lies = Callable[[fx.Node], "Format | None"]
"""The layout in which a value comes."""


def stretches(layers: Sequence[Layer], choice: Choice) -> list[list[Layer]]:
    """The layers in an order in which they can run, those of our kernels together where possible.

    A layer with another's kernel is alone. The two kinds take turns: all layers of a kind that can
    run come next, then those of the other kind.
    """
    rest, units = list(layers), []
    waiting = {layer.node for layer in layers}
    ours = False
    while rest:
        chosen, later = [], []
        for layer in rest:
            ready = waiting.isdisjoint(layer.inputs)
            if ready and choice[layer.node].implementation.ours is ours:
                chosen.append(layer)
                waiting.discard(layer.node)
            else:
                later.append(layer)
        if ours and chosen:
            units.append(chosen)
        else:
            units += [[layer] for layer in chosen]
        rest, ours = later, not ours
    return units


def together(
    record: Record,
    parts: Sequence[tuple[Layer, Implementation, Callable[[], Any]]],
    outputs: Sequence[fx.Node],
    pool: Pool | None = None,
    lies: Lies | None = None,
) -> tuple[Run, tuple[fx.Node, ...]]:
    """The layers of `parts` as one function that returns `outputs`, and the values that it reads.

    Each part is a layer, its implementation, and a function that has that one prepare. The function
    returns a single output as it is, not in a tuple. Its program takes memory from `pool`. `lies`
    tells in which layout an input comes, if not in that of the record.
    """
    from .native.values import Values

    builder = kernels.Builder()
    inputs: list[fx.Node] = []
    values = Values(record, builder)
    left = Counter(node for layer, one, _ in parts for node in {*one.inputs(layer)})
    left.update(outputs)
    of_images = {node for layer, one, _ in parts if not one.moved for node in one.inputs(layer)}
    lies = lies or (lambda node: record.values[node].layout)
    for layer, implementation, prepare in parts:
        assert implementation.emit is not None
        read = implementation.inputs(layer)
        for node in dict.fromkeys(read):
            if node not in values:
                inputs.append(node)
                contiguous = node not in of_images and lies(node) is Format.CONTIGUOUS
                values.take(node, contiguous=contiguous)
        given = [values.given(node, implementation) for node in read]
        values.put(layer.node, implementation, implementation.emit(builder, prepare(), *given))
        del given
        # Where the numbers of a tensor lie may take as much memory as the tensor.
        left.subtract({*read})
        for node in {layer.node, *read}:
            if not left[node]:
                values.drop(node)
    for node in outputs:
        values.give(node)
    program = builder.build(pool)
    if len(outputs) == 1:
        return (lambda *tensors: program(*tensors)[0]), tuple(inputs)
    return program, tuple(inputs)


def alone(
    record: Record,
    layer: Layer,
    implementation: Implementation,
    constants: Sequence[Any],
    pool: Pool | None = None,
    lies: Lies | None = None,
) -> Run:
    """The function that computes this one layer from its inputs; a program of ours uses `pool`."""
    prepared: Any = implementation.prepare(*constants)
    if implementation.emit is None:
        run: Run = prepared
        return run
    reads = implementation.reads
    program, read = together(
        record,
        [(layer, implementation, lambda: prepared)],
        [layer.node],
        pool,
        lies if reads is None else lambda node: reads,
    )
    # `conv(x) + x` reads one value twice; a program takes it once.
    if len(read) == len(layer.inputs):
        return program
    places = [layer.inputs.index(node) for node in read]
    return lambda *inputs: program(*(inputs[place] for place in places))
