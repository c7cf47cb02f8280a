"""Turn F.conv2d, F.linear, F.batch_norm and the like with constant weights into torch.nn modules.

What a module of the user's own class computes with `F.conv2d(x, self.weight)` is a convolution
like any other from then on, for folding and for whoever chooses its kernel.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.modules.conv import _ConvNd

from ..graph import add_module, attribute, bound
from ..graph.modules.layers import BatchNorm, PlainInstanceNorm
from ..graph.nodes.names import CONSTANT, is_made
from ..graph.report import PassReport, Site
from ..operators.windows import tell_sides
from ._folding_sites import name_of, path_around
from ._reporting import reported

_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSE = (
    "input",
    "weight",
    "bias",
    "stride",
    "padding",
    "output_padding",
    "groups",
    "dilation",
)
_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_RAW_NORM = (
    "input",
    "weight",
    "bias",
    "running_mean",
    "running_var",
    "training",
    "momentum",
    "eps",
)
_TENSORS = ("weight", "bias", "running_mean", "running_var")
_MODES = ("input", "training", "use_input_stats", "cudnn_enabled", "cudnn_enable")
"""What no module is made with."""

_ATEN = torch.ops.aten

_LINEAR = ("input", "weight", "bias")
_PRELU = ("input", "weight")
_LAYER_NORM = ("input", "normalized_shape", "weight", "bias", "eps")
_RMS_NORM = ("input", "normalized_shape", "weight", "eps")
_GROUP_NORM = ("input", "num_groups", "weight", "bias", "eps")
_STATISTICS = ("use_input_stats", "momentum", "eps")
_INSTANCE_NORM = ("input", "running_mean", "running_var", "weight", "bias", *_STATISTICS)
_RAW_INSTANCE_NORM = ("input", "weight", "bias", "running_mean", "running_var", *_STATISTICS)

_FUNCTIONS: dict[Any, tuple[tuple[str, ...], type[nn.Module]]] = {
    F.conv1d: (_CONV, nn.Conv1d),
    F.conv2d: (_CONV, nn.Conv2d),
    F.conv3d: (_CONV, nn.Conv3d),
    F.conv_transpose1d: (_TRANSPOSE, nn.ConvTranspose1d),
    F.conv_transpose2d: (_TRANSPOSE, nn.ConvTranspose2d),
    F.conv_transpose3d: (_TRANSPOSE, nn.ConvTranspose3d),
    F.linear: (_LINEAR, nn.Linear),
    F.layer_norm: (_LAYER_NORM, nn.LayerNorm),
    F.rms_norm: (_RMS_NORM, nn.RMSNorm),
    F.group_norm: (_GROUP_NORM, nn.GroupNorm),
    F.instance_norm: (_INSTANCE_NORM, PlainInstanceNorm),
    F.batch_norm: (_NORM, BatchNorm),
    torch.batch_norm: (_RAW_NORM, BatchNorm),
    torch.layer_norm: (_LAYER_NORM, nn.LayerNorm),
    torch.group_norm: (_GROUP_NORM, nn.GroupNorm),
    torch.prelu: (_PRELU, nn.PReLU),
    torch.instance_norm: (_RAW_INSTANCE_NORM, PlainInstanceNorm),
    # Exported programs consist of these.
    _ATEN.conv1d.default: (_CONV, nn.Conv1d),
    _ATEN.conv2d.default: (_CONV, nn.Conv2d),
    _ATEN.conv3d.default: (_CONV, nn.Conv3d),
    _ATEN.conv_transpose1d.default: (_TRANSPOSE, nn.ConvTranspose1d),
    _ATEN.conv_transpose2d.input: (_TRANSPOSE, nn.ConvTranspose2d),
    _ATEN.conv_transpose3d.input: (_TRANSPOSE, nn.ConvTranspose3d),
    _ATEN.linear.default: (_LINEAR, nn.Linear),
    _ATEN.layer_norm.default: (_LAYER_NORM, nn.LayerNorm),
    _ATEN.rms_norm.default: (_RMS_NORM, nn.RMSNorm),
    _ATEN.group_norm.default: (_GROUP_NORM, nn.GroupNorm),
    _ATEN.batch_norm.default: (_RAW_NORM, BatchNorm),
    _ATEN.instance_norm.default: (_RAW_INSTANCE_NORM, PlainInstanceNorm),
}


def lift_functional(gm: fx.GraphModule) -> PassReport:
    """Turn functional layers into modules if their weights are parameters or buffers."""
    sites = []
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target not in _FUNCTIONS:
            continue
        names, kind = _FUNCTIONS[node.target]
        arguments = bound(node, names)
        if kind is PlainInstanceNorm and arguments.get("use_input_stats") is False:
            # By statistics that are given, it computes what a batch norm does.
            kind = BatchNorm
        reason = _unfit(gm, arguments, kind)
        sites.append(Site(name_of(node), kind.__name__, not reason, reason))
        if not reason:
            _lift(gm, node, arguments, kind)
    return reported(gm, "lift_functional", sites)


def _unfit(gm: fx.GraphModule, arguments: dict[str, Any], kind: type[nn.Module]) -> str:
    for name, value in arguments.items():
        if name == "input":
            continue
        if name not in _TENSORS:
            found: list[fx.Node] = []
            fx.node.map_arg(value, found.append)  # type: ignore[arg-type]
            if found:
                return f"its {name} is computed while the model runs"
        elif value is not None:
            constant = isinstance(value, fx.Node) and value.op == "get_attr"
            if not constant or not isinstance(attribute(gm, str(value.target)), Tensor):
                return f"its {name} is computed while the model runs"
    weight: Any = arguments.get("weight")
    if kind is nn.PReLU and attribute(gm, str(weight.target)).ndim != 1:
        return "its weight is no list of numbers"
    if kind is nn.Linear and attribute(gm, str(weight.target)).ndim != 2:
        return "its weight is no matrix"
    if kind is nn.GroupNorm and all(arguments.get(name) is None for name in ("weight", "bias")):
        return "it has neither weight nor bias"
    if kind is nn.LayerNorm and arguments.get("weight") is None and arguments.get("bias"):
        return "it has a bias and no weight"
    made = {is_made(str(node.target)) for node in map(arguments.get, _TENSORS) if node is not None}
    if len(made) > 1:
        return "a cast of the model changes some of its weights, and leaves others"
    if kind is PlainInstanceNorm:
        counts = any(arguments.get(name) is not None for name in ("running_mean", "running_var"))
        own = arguments.get("use_input_stats", True)
        return "" if own and not counts else "it has running statistics"
    if kind is not BatchNorm:
        return ""
    if arguments.get("running_mean") is None or arguments.get("running_var") is None:
        return "it keeps no running statistics: it normalises by those of each batch"
    return "it is in training mode: call model.eval() first" if arguments.get("training") else ""


def _lift(
    gm: fx.GraphModule, node: fx.Node, arguments: dict[str, Any], kind: type[nn.Module]
) -> None:
    tensors = {
        name: attribute(gm, str(arguments[name].target))
        for name in _TENSORS
        if arguments.get(name) is not None
    }
    options = {k: v for k, v in arguments.items() if k not in (*_TENSORS, *_MODES)}
    module = layer(kind, tensors, options)
    with gm.graph.inserting_before(node):
        name = path_around(node).replace(".", "_") or node.name
        kept = any(is_made(str(arguments[one].target)) for one in tensors)
        name = f"{CONSTANT}_{name}" if kept else name
        called = add_module(gm.graph, name, module, (arguments["input"],))
    called.meta = dict(node.meta)
    node.replace_all_uses_with(called)
    gm.graph.erase_node(node)


def layer(kind: type[nn.Module], tensors: dict[str, Tensor], options: dict[str, Any]) -> Any:
    """Make a module of this kind that holds these very tensors."""
    build: Callable[..., Any] = kind
    weight = tensors.get("weight")
    if kind is BatchNorm:
        mean = tensors["running_mean"]
        affine = "weight" in tensors or "bias" in tensors
        if affine:
            tensors = {"weight": torch.ones_like(mean), "bias": torch.zeros_like(mean)} | tensors
        module = build(len(mean), affine=affine, device="meta", **options)
    elif kind is nn.GroupNorm:
        one = next(iter(tensors.values()))
        tensors = {"weight": torch.ones_like(one), "bias": torch.zeros_like(one)} | tensors
        module = build(options.pop("num_groups"), len(one), device="meta", **options)
    elif kind is PlainInstanceNorm:
        one = next(iter(tensors.values()), torch.empty(0))
        if tensors:
            tensors = {"weight": torch.ones_like(one), "bias": torch.zeros_like(one)} | tensors
        eps = options.get("eps", 1e-5)
        module = build(len(one), eps, affine=bool(tensors), device="meta")
    elif kind is nn.LayerNorm:
        options |= {"elementwise_affine": weight is not None, "bias": "bias" in tensors}
        module = build(**options, device="meta")
    elif kind is nn.PReLU:
        assert weight is not None
        module = build(weight.numel(), device="meta")
    elif kind is nn.RMSNorm:
        module = build(**options, elementwise_affine=weight is not None, device="meta")
    else:
        assert weight is not None
        sizes = _sizes(kind, weight, options)
        options = {k: v for k, v in options.items() if k in inspect.signature(kind).parameters}
        module = build(*sizes, bias="bias" in tensors, device="meta", **options)
        if isinstance(module, _ConvNd):
            tell_sides(module)
    for name in ("weight", "bias"):
        if name in tensors:
            setattr(module, name, _parameter(tensors[name]))
    for name in ("running_mean", "running_var"):
        if name in tensors:
            setattr(module, name, tensors[name].detach())
    if kind is BatchNorm:
        module.num_batches_tracked = torch.zeros(
            (), dtype=torch.long, device=tensors["running_mean"].device
        )
    return module.eval()


def _sizes(kind: type[nn.Module], weight: Tensor, options: dict[str, Any]) -> tuple[Any, ...]:
    groups = options.get("groups", 1)
    if kind is nn.Linear:
        return weight.shape[1], weight.shape[0]
    kernel = tuple(weight.shape[2:])
    if kind in (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d):
        return weight.shape[0], weight.shape[1] * groups, kernel
    return weight.shape[1] * groups, weight.shape[0], kernel


def _parameter(tensor: Tensor) -> nn.Parameter:
    if isinstance(tensor, nn.Parameter):
        return tensor
    return nn.Parameter(tensor.detach(), requires_grad=False)
