"""Two layers as one step of ours: a depthwise convolution with the 1x1 before it or behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...kernels.convolutions.depthwise import Window
from ...kernels.convolutions.expanded import Expansion, expanded_depthwise_step, serves
from ...kernels.convolutions.projected import Depthwise, projected_depthwise_step
from ..recording import Record
from ..specs import Convolution, Layer
from .kernel import Constants, Native, code_of, one_step

EXPANDED, PROJECTED = "nhwc expanded depthwise", "nhwc projected depthwise"


@dataclass(frozen=True)
class Pair:
    """Two layers that one kernel can compute: `second` alone reads what `first` writes."""

    kernel: str
    first: Layer
    second: Layer

    @property
    def layer(self) -> Layer:
        """The second layer, reading what the first one reads."""
        return replace(self.second, inputs=(*self.first.inputs, *self.second.inputs[1:]))

    def native(self, constants: Constants, record: Record) -> Native:
        """The kernel for `layer`; `constants` are those of the first, which it holds."""
        one, two = self.first.spec, self.second.spec
        if not isinstance(one, Convolution) or not isinstance(two, Convolution):
            raise AssertionError("a pair is of convolutions")
        inner, outer = code_of(one.activation), code_of(two.activation)
        if inner is None or outer is None:
            raise AssertionError("layers of our kernels have activations that these know")
        settings: dict[str, Any] = {"activation": outer[0], "slope": outer[1]}
        if self.kernel == EXPANDED:
            before: Any = Expansion(*constants, *inner)
            make: Any = expanded_depthwise_step
            settings["window"] = _window(two)
        else:
            before = Depthwise(*constants, _window(one), *inner)
            make = projected_depthwise_step

        def step(x: Any, y: Any, *own: Any, **more: Any) -> Any:
            return make(x, y, before, *own, **more)

        return Native(
            self.kernel, True, one_step(record.values[self.second.node].shape, step, **settings)
        )


def pairs_in(layers: Sequence[Layer], record: Record) -> Iterator[Pair]:
    """All pairs among layers of our kernels; a layer may be in two of them."""
    by_node = {layer.node: layer for layer in layers}
    for second in layers:
        first = by_node.get(second.inputs[0]) if second.inputs else None
        if first is None or first.node in second.inputs[1:]:
            continue  # What it reads may be added to the result as well.
        kernel = _kernel(first, second, record)
        if kernel and set(first.node.users) == {second.node}:
            yield Pair(kernel, first, second)


def _kernel(first: Layer, second: Layer, record: Record) -> str | None:
    one, two = first.spec, second.spec
    if not isinstance(one, Convolution) or not isinstance(two, Convolution) or one.residual:
        return None
    width = record.values[second.node].shape[3]
    if _is_pointwise(one) and _is_depthwise(two) and serves(one.input[1], _window(two), width):
        return EXPANDED
    if _is_depthwise(one) and _is_pointwise(two) and _window(one).tile(width):
        return PROJECTED
    return None


def _is_pointwise(spec: Convolution) -> bool:
    """Whether each output pixel sees one input pixel, and all of its channels."""
    flat = tuple(spec.weight[2:]) == (1, 1) and tuple(spec.stride) == (1, 1)
    return flat and tuple(spec.padding) == (0, 0) and spec.groups == 1


def _is_depthwise(spec: Convolution) -> bool:
    return spec.groups == spec.input[1] == spec.weight[0] > 1


def _window(spec: Convolution) -> Window:
    size, stride, padding, dilation = (
        (pair[0], pair[1]) for pair in (spec.weight[2:], spec.stride, spec.padding, spec.dilation)
    )
    return Window(size, stride, padding, dilation)
