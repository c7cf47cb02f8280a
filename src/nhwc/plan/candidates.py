"""The kernels that can serve a layer: torch's own, and oneDNN's with weights packed beforehand.

A candidate says in which layout it reads its images and in which it writes, whether it sums
exactly the products that the layer names, and how to prepare its weights once. What `prepare`
returns is called with the layer's inputs and returns its result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from .. import kernels
from ..formats import CHANNELS_LAST_OF, Format, to_format
from .cuda import fused_convolutions
from .recording import Record
from .specs import Activation, Affine, Convolution, Layer, Linear, Operator, Spec, Weighted

if TYPE_CHECKING:
    from .native.kernel import Native

Run = Callable[..., Any]
Prepare = Callable[..., Run]


@dataclass(frozen=True)
class Candidate:
    """One way to compute a layer; `free` if it is nothing but a note of where data lies."""

    name: str
    reads: Format | None
    writes: Format | None
    exact: bool
    prepare: Prepare
    free: bool = False


def candidates_of(graph: fx.GraphModule, record: Record, layer: Layer) -> list[Candidate]:
    """All that can compute a layer, torch's kernels first; of an operator ours alone."""
    found = [] if isinstance(layer.spec, Operator) else list(candidates_for(layer.spec))
    if len(found) > 1 and _is_volume(layer.spec) and _views_volumes(graph, record):
        found = found[:1]
    for native in natives_of(graph, record, layer):
        found += _native_candidates(record, layer, native)
    return found


def natives_of(graph: fx.GraphModule, record: Record, layer: Layer) -> tuple[Native, ...]:
    """Our own kernels for a layer, where this machine can have them."""
    if not kernels.available():
        return ()
    from .native import natives_of as found

    return found(graph, record, layer)


def _native_candidates(record: Record, layer: Layer, native: Native) -> list[Candidate]:
    def prepare(weight: Tensor | None, bias: Tensor | None) -> Run:
        from .native.stretch import single

        constants = None if weight is None else (weight, bias)
        return single(native, layer, constants, record)

    last, plain = Format.CHANNELS_LAST, Format.CONTIGUOUS
    image = record.image(layer.inputs[0])
    reads = [last, plain] if image and image.shape[1] <= 4 else [last]
    return [
        Candidate(native.name, layout, last, native.exact, prepare, native.free) for layout in reads
    ]


def candidates_for(spec: Weighted) -> tuple[Candidate, ...]:
    """Torch's kernels, oneDNN's and cuDNN's for `spec`; the first is what eager torch does."""
    if isinstance(spec, Linear):
        return linear_candidates(spec)
    if isinstance(spec, Affine):
        return affine_candidates(spec)
    if _is_volume(spec):
        return volume_candidates(spec)
    if spec.device.startswith("cuda"):
        fused = fused_convolutions(spec)
        return (
            *convolution_candidates(spec),
            *(Candidate("cudnn", layout, layout, True, prepare) for layout, prepare in fused),
        )
    return convolution_candidates(spec)


def convolution_candidates(spec: Convolution) -> tuple[Candidate, ...]:
    """Eager torch in both layouts, and oneDNN's prepacked kernel, which writes channels last."""
    last, plain = Format.CHANNELS_LAST, Format.CONTIGUOUS

    def eager(layout: torch.memory_format) -> Prepare:
        return lambda weight, bias: _eager_convolution(
            spec, weight.contiguous(memory_format=layout), bias
        )

    found = [Candidate("torch", plain, plain, True, eager(torch.contiguous_format))]
    attribute = onednn_activation(spec.activation)
    if not _onednn_serves(spec.dtype, spec.device) or attribute is None:
        return (*found, Candidate("torch", last, last, True, eager(torch.channels_last)))
    packed: Prepare = lambda weight, bias: _onednn_convolution(spec, weight, bias, attribute)
    found.append(Candidate("onednn", last, last, True, packed))
    if spec.input[1] <= 4:
        # Images come contiguous: the first convolution may convert them on the way.
        found.append(Candidate("onednn", plain, last, True, packed))
    return tuple(found)


def volume_candidates(spec: Convolution) -> tuple[Candidate, ...]:
    """Eager torch, and oneDNN's prepacked kernel in channels_last_3d.

    Layouts of volumes are not planned: oneDNN's kernel converts what comes otherwise, and what it
    writes stays in its layout through the operators between convolutions.
    """
    eager: Prepare = lambda weight, bias: _eager_convolution(spec, weight.contiguous(), bias)
    found = [Candidate("torch", None, None, True, eager)]
    attribute = onednn_activation(spec.activation)
    if _onednn_serves(spec.dtype, spec.device) and attribute is not None:
        last = torch.channels_last_3d

        def packed(weight: Tensor, bias: Tensor | None) -> Run:
            run = _onednn_convolution(spec, weight, bias, attribute)
            return lambda *inputs: run(*(x.contiguous(memory_format=last) for x in inputs))

        found.append(Candidate("onednn", None, None, True, packed))
    return tuple(found)


def _is_volume(spec: Spec) -> bool:
    return isinstance(spec, Convolution) and len(spec.input) == 5


def _views_volumes(graph: fx.GraphModule, record: Record) -> bool:
    """Whether the graph looks at the memory of a volume, which must then lie as it always did."""
    for node in graph.graph.nodes:
        name = getattr(node.target, "__name__", node.target)
        if name in ("view", "view_as", "as_strided", "stride") and node.all_input_nodes:
            seen = record.tensor(node.all_input_nodes[0])
            if seen and len(seen.shape) == 5:
                return True
    return False


def linear_candidates(spec: Linear) -> tuple[Candidate, ...]:
    found = [Candidate("torch", None, None, True, lambda w, b: _eager_linear(spec, w, b))]
    attribute = onednn_activation(spec.activation)
    packs = hasattr(torch.ops.mkldnn, "_linear_pointwise")
    if packs and attribute is not None and _onednn_serves(spec.dtype, spec.device):
        packed: Prepare = lambda weight, bias: _onednn_linear(spec, weight, bias, attribute)
        found.append(Candidate("onednn", None, None, True, packed))
    return tuple(found)


def affine_candidates(spec: Affine) -> tuple[Candidate, ...]:
    """A multiplication and an addition in one pass over the data, in either layout."""

    def prepare(scale: Tensor, shift: Tensor) -> Run:
        scale, shift = scale.view(1, -1, 1, 1), shift.view(1, -1, 1, 1)
        activate = activate_(spec.activation)
        if spec.residual:
            return lambda x, residual: activate(torch.addcmul(shift, x, scale).add_(residual))
        return lambda x: activate(torch.addcmul(shift, x, scale))

    layouts = (Format.CONTIGUOUS, Format.CHANNELS_LAST)
    return tuple(Candidate("torch", layout, layout, True, prepare) for layout in layouts)


def activate_(activation: Activation | None) -> Callable[[Tensor], Tensor]:
    """The function that applies `activation` to a tensor nobody else reads, in place if it can."""
    if activation is None:
        return lambda x: x
    low, high = (*activation.numbers, 0.0, 0.0)[:2]
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": torch.relu_,
        "sigmoid": torch.sigmoid_,
        "tanh": torch.tanh_,
        "silu": lambda x: F.silu(x, inplace=True),
        "hardswish": lambda x: F.hardswish(x, inplace=True),
        "hardsigmoid": lambda x: F.hardsigmoid(x, inplace=True),
        "hardtanh": lambda x: F.hardtanh(x, low, high, inplace=True),
        "leaky_relu": lambda x: F.leaky_relu(x, low, inplace=True),
        "mish": lambda x: F.mish(x, inplace=True),
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    }
    return functions[activation.name]


def onednn_activation(activation: Activation | None) -> tuple[str, list[Any], str] | None:
    """Name, numbers and algorithm as oneDNN's fused kernels want them; None if they cannot.

    "none" leaves the activation to torch: oneDNN's fused relu and hardtanh make 0 of NaN, and
    behind an addition its relu makes a finite number of infinity in grouped convolutions.
    """
    if activation is None or activation.name in ("relu", "hardtanh"):
        return "none", [], ""
    if activation.name in ("gelu", "gelu_tanh"):
        return "gelu", [], "tanh" if activation.name == "gelu_tanh" else "none"
    if activation.name in ("sigmoid", "tanh", "hardswish", "leaky_relu"):
        return activation.name, list(activation.numbers), ""
    return ("swish", [], "") if activation.name == "silu" else None


def _onednn_serves(dtype: torch.dtype, device: str) -> bool:
    return dtype is torch.float32 and device == "cpu" and torch.backends.mkldnn.is_available()


def _eager_convolution(spec: Convolution, weight: Tensor, bias: Tensor | None) -> Run:
    tail = (bias, spec.stride, spec.padding, spec.dilation, spec.groups)
    convolve: Run = torch.conv3d if weight.ndim == 5 else torch.conv2d  # type: ignore[assignment]
    activate = activate_(spec.activation)
    if spec.residual:
        return lambda x, residual: activate(convolve(x, weight, *tail).add_(residual))
    return lambda x: activate(convolve(x, weight, *tail))


def _onednn_convolution(
    spec: Convolution, weight: Tensor, bias: Tensor | None, attribute: tuple[str, list[Any], str]
) -> Run:
    name, numbers, algorithm = attribute
    stride, padding, dilation = list(spec.stride), list(spec.padding), list(spec.dilation)
    packed = torch.ops.mkldnn._reorder_convolution_weight(
        to_format(weight, CHANNELS_LAST_OF[weight.ndim]),
        padding,
        stride,
        dilation,
        spec.groups,
        list(spec.input),
    )
    geometry = (padding, stride, dilation, spec.groups)
    if not spec.residual:
        alone = torch.ops.mkldnn._convolution_pointwise.default
        finish = activate_(spec.activation if name == "none" else None)
        return lambda x: finish(alone(x, packed, bias, *geometry, name, numbers, algorithm))
    added = torch.ops.mkldnn._convolution_pointwise.binary
    # oneDNN fuses no activation behind an addition, but for relu, and not as torch computes it.
    activate = activate_(spec.activation)
    return lambda x, residual: activate(
        added(x, residual, packed, bias, *geometry, "add", 1.0, None, [], None)
    )


def _eager_linear(spec: Linear, weight: Tensor, bias: Tensor | None) -> Run:
    activate = activate_(spec.activation)
    if spec.residual:
        return lambda x, residual: activate(F.linear(x, weight, bias).add_(residual))
    return lambda x: activate(F.linear(x, weight, bias))


def _onednn_linear(
    spec: Linear, weight: Tensor, bias: Tensor | None, attribute: tuple[str, list[Any], str]
) -> Run:
    rows = 1
    for size in spec.input[:-1]:
        rows *= size
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
    alone = torch.ops.mkldnn._linear_pointwise.default
    activate = activate_(spec.activation)
    if spec.residual:
        return lambda x, residual: activate(alone(x, packed, bias, "none", [], "").add_(residual))
    if attribute[0] == "none":
        return lambda x: activate(alone(x, packed, bias, *attribute))
    return lambda x: alone(x, packed, bias, *attribute)
