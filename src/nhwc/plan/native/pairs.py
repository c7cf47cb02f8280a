"""Two layers as one step of ours: a 1x1 convolution and the depthwise one that alone reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from ...kernels.expanded import Expansion, Window, expanded_depthwise_step, serves
from ..recording import Record
from ..specs import Convolution, Layer
from .kernel import Constants, Native, code_of, one_step


def expansions(layers: Sequence[Layer], record: Record) -> dict[fx.Node, Layer]:
    """The layers that need not run on their own, by the node of the layer that takes them in."""
    by_node = {layer.node: layer for layer in layers}
    found = {}
    for layer in layers:
        before = by_node.get(layer.inputs[0]) if layer.inputs else None
        if before and before.node in layer.inputs[1:]:
            continue  # What it reads is added to the result as well.
        if before and set(before.node.users) == {layer.node} and _fit(before, layer, record):
            found[layer.node] = before
    return found


def joined(first: Layer, second: Layer, constants: Constants, record: Record) -> Native:
    """`second` with `first`, whose constants these are, in it; its first input is that of `first`.

    Only for what `expansions` found.
    """
    spec: Any = second.spec
    inner, outer = code_of(first.spec.activation), code_of(spec.activation)  # type: ignore[union-attr]
    if inner is None or outer is None:
        raise AssertionError("layers of our kernels have activations that these know")
    expansion = Expansion(*constants, *inner)

    def step(x: Any, y: Any, *own: Any, **settings: Any) -> Any:
        return expanded_depthwise_step(x, y, expansion, *own, **settings)

    settings = {"window": _window(spec), "activation": outer[0], "slope": outer[1]}
    emit = one_step(record.values[second.node].shape, step, **settings)
    return Native("nhwc expanded depthwise", True, emit)


def _fit(first: Layer, second: Layer, record: Record) -> bool:
    one, two = first.spec, second.spec
    if not isinstance(one, Convolution) or not isinstance(two, Convolution):
        return False
    flat = tuple(one.weight[2:]) == (1, 1) and tuple(one.stride) == (1, 1)
    plain = flat and tuple(one.padding) == (0, 0) and one.groups == 1 and not one.residual
    depthwise = two.groups == two.input[1] == two.weight[0] > 1
    width = record.values[second.node].shape[3]
    return plain and depthwise and serves(one.input[1], _window(two), width)


def _window(spec: Convolution) -> Window:
    size, stride, padding, dilation = (
        (pair[0], pair[1]) for pair in (spec.weight[2:], spec.stride, spec.padding, spec.dilation)
    )
    return Window(size, stride, padding, dilation)
