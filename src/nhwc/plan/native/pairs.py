"""Two layers as one step of ours: a depthwise convolution with the 1x1 before it or behind it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import fx

from ...kernels.convolutions.depthwise import Window
from ...kernels.convolutions.expanded import Expansion, expanded_depthwise_step, serves
from ...kernels.convolutions.projected import Depthwise, projected_depthwise_step
from ..implementation import Implementation
from ..recording import Record
from ..specs import Convolution, Layer
from .weighted import in_ours, one_step, ours

EXPANDED, PROJECTED = "nhwc expanded depthwise", "nhwc projected depthwise"


def joints_of(
    record: Record, layers: Sequence[Layer], readers: Mapping[fx.Node, Collection[fx.Node]]
) -> dict[fx.Node, Implementation]:
    """Kernels for two of `layers` at once, by the node of the second one.

    The second one is the only one of `readers` of the first. A layer may be in two pairs.
    """
    by_node = {layer.node: layer for layer in layers if isinstance(layer.spec, Convolution)}
    found = {}
    for second in by_node.values():
        first = by_node.get(second.inputs[0])
        # The second may also add the result of the first to its own: then that must exist.
        if first is None or first.node in second.inputs[1:]:
            continue
        joint = _joint(record, first, second)
        if joint and set(readers[first.node]) == {second.node}:
            found[second.node] = joint
    return found


def _joint(record: Record, first: Layer, second: Layer) -> Implementation | None:
    one, two = first.spec, second.spec
    if not isinstance(one, Convolution) or not isinstance(two, Convolution) or one.residual:
        return None
    inner, outer = in_ours(one.activation), in_ours(two.activation)
    if inner is None or outer is None:
        return None
    shape = record.values[second.node].shape
    settings: dict[str, Any] = {"activation": outer[0], "slope": outer[1]}
    if _is_pointwise(one) and _is_depthwise(two) and serves(one.input[1], _window(two), shape[3]):
        name, window = EXPANDED, _window(two)
        emit = one_step(shape, expanded_depthwise_step, window=window, **settings)
        held: Callable[..., Any] = lambda weight, bias: Expansion(weight, bias, *inner)
    elif _is_depthwise(one) and _is_pointwise(two) and _window(one).tile(shape[3]):
        name, emit = PROJECTED, one_step(shape, projected_depthwise_step, **settings)
        held = lambda weight, bias: Depthwise(weight, bias, _window(one), *inner)
    else:
        return None
    prepare = lambda weight, bias, *own: (held(weight, bias), *own)
    return ours(name, emit, prepare=prepare, before=first)


def _is_pointwise(spec: Convolution) -> bool:
    """Whether each output pixel sees one input pixel, and all of its channels."""
    flat = tuple(spec.weight[2:]) == (1, 1) and tuple(spec.stride) == (1, 1)
    return flat and not any((*spec.padding, *(spec.behind or ()))) and spec.groups == 1


def _is_depthwise(spec: Convolution) -> bool:
    """Whether each channel has one filter, which sees as little behind the image as windows may."""
    little = spec.behind is None or spec.behind[-1] <= spec.weight[-1] // 2
    return little and spec.groups == spec.input[1] == spec.weight[0] > 1


def _window(spec: Convolution) -> Window:
    size, stride, padding, dilation = (
        (pair[0], pair[1]) for pair in (spec.weight[2:], spec.stride, spec.padding, spec.dilation)
    )
    return Window(size, stride, padding, dilation)
