"""The kernels of others: torch's, cuDNN's, oneDNN's with packed weights; and any call as it is.

`prepare` turns a layer's weights into the function that computes it. Torch's kernel comes first: it
is what eager torch does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..formats import CHANNELS_LAST_OF, Format, to_format
from ..graph import filled
from ..graph.modules.leaves import runs_hooks
from ..kernels.tape.pages import shared
from ..operators.activations import NamedActivation, in_onednn, in_torch
from ..operators.unseen import sees_no_column
from .gpu import kernels_for_gpu
from .implementation import Implementation, Run
from .recording import Record, laid_out
from .specs import Affine, Convolution, Layer, Linear, OperatorSpec, Weighted

Prepare = Callable[..., Run]

_CONVOLVES: dict[int, Run] = {3: torch.conv1d, 4: torch.conv2d, 5: torch.conv3d}
"""By the dimensions of the filters."""

Attribute = tuple[str, list[Any], str]
"""An activation as oneDNN wants it: name, numbers, algorithm."""

_UNFUSED: Attribute = ("none", [], "")

_LAST, _PLAIN = Format.CHANNELS_LAST, Format.CONTIGUOUS


def kernels_of_others(layer: Layer) -> tuple[Implementation, ...]:
    """The kernels of others for a layer; none for an operator, which `Scene.called` calls."""
    return () if isinstance(layer.spec, OperatorSpec) else kernels_for(layer.spec)


def kernels_for(spec: Weighted) -> tuple[Implementation, ...]:
    """The kernels of others for `spec`, torch's first."""
    if isinstance(spec, Linear):
        found = _for_linear(spec)
    elif isinstance(spec, Affine):
        found = _for_affine(spec)
    else:
        found = _for_convolution(spec)
    return (*found, *kernels_for_gpu(spec))


def _torch(prepare: Prepare, layout: Format | None = None) -> Implementation:
    """Torch's own kernel, which reads the weights where they lie."""
    return Implementation("torch", layout, layout, prepare, copies=0.0)


def _for_convolution(spec: Convolution) -> tuple[Implementation, ...]:
    """Eager torch in both layouts, and fused kernels with weights packed for them."""
    if spec.behind is None and not spec.held:
        return _for_even_padding(spec)
    found = _for_even_padding(spec.of_padded())
    return tuple(replace(one, prepare=partial(_behind_pad, spec, one)) for one in found)


def _behind_pad(spec: Convolution, one: Implementation, *constants: Any) -> Run:
    """What computes `spec`, of an implementation for its padded input."""
    run = one.prepare(*constants)
    ends = [*zip(spec.padding, spec.behind or spec.padding, strict=True)]
    of_frames = [*[0] * 4, *ends[0]] if spec.held else []
    # torch names the last side first.
    zeros = [number for pair in reversed(ends[spec.held :]) for number in pair]

    def convolve(x: Tensor, *residual: Tensor) -> Tensor:
        padded = F.pad(x, of_frames, "replicate") if of_frames else x
        padded = F.pad(padded, zeros)
        result: Tensor = run(laid_out(padded, one.reads) if one.reads else padded, *residual)
        return result

    return convolve


def _for_even_padding(spec: Convolution) -> tuple[Implementation, ...]:
    eager = partial(_eager_convolution, spec)
    if len(spec.input) == 3:
        return (_torch(partial(eager, layout=torch.contiguous_format)),)
    volume = len(spec.input) == 5
    last = torch.channels_last_3d if volume else torch.channels_last
    found = [_torch(partial(eager, layout=torch.contiguous_format), _PLAIN)]
    if not _onednn_serves(spec.dtype, spec.device):
        return (*found, _torch(partial(eager, layout=last), _LAST))
    if _deadly(spec):
        return tuple(found)
    packed: Prepare = partial(_onednn_convolution, spec)
    found.append(Implementation("onednn", _LAST, _LAST, packed))
    if spec.input[1] <= 4:
        # Images come contiguous: the first convolution may convert them on the way.
        found.append(Implementation("onednn", _PLAIN, _LAST, packed))
    return tuple(found)


def _deadly(spec: Convolution) -> bool:
    """Whether oneDNN's kernels for channels last would kill the process."""
    geometry = {"stride": spec.stride, "padding": spec.padding, "dilation": spec.dilation}
    row = {name: numbers[-1] for name, numbers in geometry.items()}
    return sees_no_column(spec.input[-1], spec.weight[-1], **row)


def _for_linear(spec: Linear) -> tuple[Implementation, ...]:
    found = [_torch(partial(_eager_linear, spec))]
    packs = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if packs and _onednn_serves(spec.dtype, spec.device):
        found.append(Implementation("onednn", None, None, partial(_onednn_linear, spec)))
    return tuple(found)


def _for_affine(spec: Affine) -> tuple[Implementation, ...]:
    """A multiplication and an addition in one pass over the data, in either layout."""

    def prepare(scale: Tensor, shift: Tensor) -> Run:
        along = (1, -1, *[1] * (len(spec.input) - 2))
        scale, shift = scale.view(along), shift.view(along)
        activate = in_torch(spec.activation)
        if spec.residual:
            return lambda x, residual: activate(torch.addcmul(shift, x, scale).add_(residual))
        return lambda x: activate(torch.addcmul(shift, x, scale))

    if len(spec.input) == 3:
        return (_torch(prepare),)
    return _torch(prepare, _PLAIN), _torch(prepare, _LAST)


def _onednn_serves(dtype: torch.dtype, device: str) -> bool:
    return dtype is torch.float32 and device == "cpu" and torch.backends.mkldnn.is_available()


def _eager_convolution(
    spec: Convolution, weight: Tensor, bias: Tensor | None, *, layout: torch.memory_format
) -> Run:
    weight = weight.contiguous(memory_format=layout)
    tail = (bias, spec.stride, spec.padding, spec.dilation, spec.groups)
    convolve: Run = _CONVOLVES[weight.ndim]
    activate = in_torch(spec.activation)
    if spec.residual:
        return lambda x, residual: activate(convolve(x, weight, *tail).add_(residual))
    return lambda x: activate(convolve(x, weight, *tail))


def _fused(activation: NamedActivation | None) -> tuple[Attribute, Callable[[Tensor], Tensor]]:
    """The activation for oneDNN to apply, and the function that applies it where oneDNN cannot."""
    attribute = in_onednn(activation)
    return (attribute, in_torch(None)) if attribute else (_UNFUSED, in_torch(activation))


def _onednn_convolution(spec: Convolution, weight: Tensor, bias: Tensor | None) -> Run:
    stride, padding, dilation = list(spec.stride), list(spec.padding), list(spec.dilation)
    packed = torch.ops.mkldnn._reorder_convolution_weight(
        to_format(weight, CHANNELS_LAST_OF[weight.ndim]),
        padding,
        stride,
        dilation,
        spec.groups,
        list(spec.input),
    )
    packed = shared(packed)
    geometry = (padding, stride, dilation, spec.groups)
    if not spec.residual:
        alone = torch.ops.mkldnn._convolution_pointwise.default
        attribute, finish = _fused(spec.activation)
        return lambda x: finish(alone(x, packed, bias, *geometry, *attribute))
    added = torch.ops.mkldnn._convolution_pointwise.binary
    # Behind an addition oneDNN fuses only relu, and computes it otherwise than torch.
    activate = in_torch(spec.activation)
    return lambda x, residual: activate(
        added(x, residual, packed, bias, *geometry, "add", 1.0, None, [], None)
    )


def _eager_linear(spec: Linear, weight: Tensor, bias: Tensor | None) -> Run:
    activate = in_torch(spec.activation)
    if spec.residual:
        return lambda x, residual: activate(F.linear(x, weight, bias).add_(residual))
    return lambda x: activate(F.linear(x, weight, bias))


def _onednn_linear(spec: Linear, weight: Tensor, bias: Tensor | None) -> Run:
    rows = math.prod(spec.input[:-1])
    packed = shared(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows))
    alone = torch.ops.mkldnn._linear_pointwise.default
    if spec.residual:
        activate = in_torch(spec.activation)
        return lambda x, residual: activate(alone(x, packed, bias, "none", [], "").add_(residual))
    attribute, finish = _fused(spec.activation)
    return lambda x: finish(alone(x, packed, bias, *attribute))


def caller(graph: fx.GraphModule, record: Record, node: fx.Node) -> Run:
    """The function that calls what `node` calls, on the values that it reads.

    Arguments that the record showed to be fixed are filled in here, once.
    """
    inputs = record.read_by(node)
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), record.known)
    function = _function(graph, node, args)
    if not kwargs and args[: len(inputs)] == inputs:
        constants = args[len(inputs) :]
        if not any(_holds_node(value) or isinstance(value, list) for value in constants):
            if not constants:
                return function
            return lambda *values: function(*values, *constants)

    def call(*values: Any) -> Any:
        given = dict(zip(inputs, values, strict=True))
        a, k = filled((args, kwargs), given.__getitem__)
        return function(*a, **k)

    return call


def _function(graph: fx.GraphModule, node: fx.Node, args: tuple[Any, ...]) -> Callable[..., Any]:
    if node.op == "call_method":
        name = str(node.target)
        if name == "view" and _is_shape(args[1:]):
            # A plan may give its input other strides than the graph does.
            name = "reshape"
        return lambda self, *args, **kwargs: getattr(self, name)(*args, **kwargs)
    if node.op == "call_module":
        module = graph.get_submodule(str(node.target))
        # Without hooks, forward is all that a call does, and a call costs a microsecond more.
        called = module if runs_hooks(module) else module.forward
        return _of_any_volume(called) if type(module) in _SHUFFLES else called
    assert callable(node.target)
    shuffles = node.target in (F.pixel_shuffle, F.pixel_unshuffle)
    return _of_any_volume(node.target) if shuffles else node.target


_SHUFFLES = (nn.PixelShuffle, nn.PixelUnshuffle)


def _of_any_volume(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which refuses volumes that lie channels last, as a plan may lay them."""

    def call(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if input.ndim == 5:
            # One channel lies both ways, by strides that contiguous() keeps and flat memory lacks.
            input = input.contiguous().view(-1).view(input.shape)
        return function(input, *args, **kwargs)

    return call


def _is_shape(given: tuple[Any, ...]) -> bool:
    sizes = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    return bool(sizes) and all(type(size) is int for size in sizes)


def _holds_node(value: Any) -> bool:
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)  # type: ignore[arg-type]
    return bool(found)
