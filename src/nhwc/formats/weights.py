"""Find the weights of 2-D and 3-D convolutions in a model of any kind.

The class of a layer of torch names its weight. TorchScript, graphs of torch.fx and exported
programs show theirs in their graphs. The code of any other module is read, never run: a weight is
an attribute that it hands as such to `conv2d` or its like.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import InputError, of_kind
from ..models.trees import has_strides
from .source import CONVOLUTIONS, weights_in_code

_PACKED = ("quantized", "prepacked", "mkldnn_prepacked", "prim")
"""Namespaces of TorchScript's convolutions that read weights packed for their kernel."""

_DERIVED = ("", "_orig", "_v", "_g", "_mask")
"""Endings of the names that torch.nn.utils stores tensors by, to compute a weight from them."""


@dataclass(frozen=True)
class Weight:
    """A tensor that a convolution reads its weight from, and its name in the model."""

    name: str
    tensor: Tensor


@dataclass
class _Found:
    weights: dict[int, Weight] = field(default_factory=dict)
    packed: list[str] = field(default_factory=list)
    codes: dict[type, frozenset[str]] = field(default_factory=dict)
    """Attributes that the code of a class hands to convolutions."""
    seen: set[int] = field(default_factory=set)

    def add(self, name: str, value: object) -> None:
        if isinstance(value, Tensor) and not is_lazy(value) and value.ndim in (4, 5):
            if value.layout is torch.strided and not value.is_quantized:
                self.weights.setdefault(id(value), Weight(name, value))
            else:
                self.packed.append(name)


def convolution_weights(model: nn.Module) -> list[Weight]:
    """The 4-D and 5-D tensors of `model` that its convolutions read their weights from.

    >>> [weight.name for weight in convolution_weights(nn.Sequential(nn.Conv2d(3, 8, 3)))]
    ['0.weight']
    """
    return [*_search(model).weights.values()]


def packed_convolutions(model: nn.Module) -> list[str]:
    """The convolutions whose weights are packed for one kernel, and have no strides to change."""
    return _search(model).packed


def _search(model: nn.Module) -> _Found:
    found = _Found()
    _visit(model, "", found)
    return found


def _visit(module: nn.Module, path: str, found: _Found) -> None:
    if id(module) in found.seen:
        return
    found.seen.add(id(module))
    if isinstance(module, torch.jit.ScriptModule):
        _of_script(module, path, found)
        return
    if isinstance(module, _ConvNd):
        _of_layer(module, path, found)
    elif _is_quantized(module):
        found.packed.append(path)
    elif isinstance(getattr(module, "graph", None), fx.Graph):
        _of_graph(module, path, found)
    else:
        _of_code(module, path, found)
    for name, child in module.named_children():
        _visit(child, _below(path, name), found)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _of_layer(layer: _ConvNd, path: str, found: _Found) -> None:
    if is_lazy(layer.weight):
        raise InputError(
            f"{path or 'the module'} ({type(layer).__name__}) has no weight yet: it is lazy. "
            "Run the model once on an example input, then convert it."
        )
    # A parametrized weight is computed anew on each access, from parameters that last.
    lists: Any = getattr(layer, "parametrizations", {})
    if "weight" in lists:
        for name, parameter in lists["weight"].named_parameters():
            found.add(_below(path, f"parametrizations.weight.{name}"), parameter)
        return
    # Pruning multiplies the weight by a buffer, which decides the format of the product.
    for name, tensor in (*layer._parameters.items(), *layer._buffers.items()):
        found.add(_below(path, name), tensor)


def _is_quantized(module: nn.Module) -> bool:
    """Whether this is one of torch's quantized convolutions, which compute channels last anyway."""
    home = sys.modules.get("torch.ao.nn.quantized.modules.conv")
    return home is not None and isinstance(module, home._ConvNd)


def _of_graph(module: Any, path: str, found: _Found) -> None:
    for node in module.graph.nodes:
        if node.op != "call_function" or _name_of(node.target) not in CONVOLUTIONS:
            continue
        weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
        read: list[str] = []
        if isinstance(weight, fx.Node) and _is_stored(weight, read):
            for name in read:
                found.add(_below(path, name), functools.reduce(getattr, name.split("."), module))


def _name_of(target: Any) -> str:
    # An overload is named `operator.overload`.
    return str(getattr(target, "__name__", "")).partition(".")[0]


def _is_stored(value: fx.Node, read: list[str]) -> bool:
    """Whether `value` is computed from tensors of the model alone; their names go to `read`."""
    if value.op == "get_attr":
        read.append(str(value.target))
        return True
    computed = value.op in ("call_function", "call_method")
    return computed and all(_is_stored(node, read) for node in value.all_input_nodes)


def _of_script(module: torch.jit.ScriptModule, path: str, found: _Found) -> None:
    for method in module._c._method_names():
        for node in _script_nodes(module._c._get_method(method).inlined_graph):
            domain, _, name = node.kind().partition("::")
            if domain in _PACKED and "conv" in name:
                found.packed.append(path)
            elif domain == "aten" and name in CONVOLUTIONS:
                read: list[tuple[str, Tensor]] = []
                if _is_stored_in_script(list(node.inputs())[1].node(), module, read):
                    for own, tensor in read:
                        found.add(_below(path, own), tensor)


def _script_nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _script_nodes(inner)


def _is_stored_in_script(
    node: Any, module: torch.jit.ScriptModule, read: list[tuple[str, Tensor]]
) -> bool:
    """Do the same as `_is_stored`; a frozen module holds its weights as constants of the graph."""
    if node.kind() == "prim::Constant":
        if node.hasAttribute("value") and node.kindOf("value") == "t":
            read.append((node.output().debugName(), node.t("value")))
        return True
    if node.kind() == "prim::GetAttr":
        names: list[str] = []
        while node.kind() == "prim::GetAttr":
            names.insert(0, node.s("name"))
            node = node.input().node()
        value = functools.reduce(getattr, names, module) if node.kind() == "prim::Param" else None
        if isinstance(value, Tensor):
            read.append((".".join(names), value))
        return value is not None
    if node.kind() == "prim::Param" or list(node.blocks()):
        return False
    return all(_is_stored_in_script(value.node(), module, read) for value in node.inputs())


def _of_code(module: nn.Module, path: str, found: _Found) -> None:
    held = {**module._parameters, **module._buffers}
    for name, child in module._modules.items():
        if isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            held[name] = child  # type: ignore[assignment]
    lists: Any = getattr(module, "parametrizations", {})
    if not held and not lists:
        return
    kind = type(module)
    if kind not in found.codes:
        found.codes[kind] = weights_in_code(kind)
    for name in sorted(found.codes[kind]):
        if name in lists:
            for own, parameter in lists[name].named_parameters():
                found.add(_below(path, f"parametrizations.{name}.{own}"), parameter)
        for stored in (name + ending for ending in _DERIVED):
            value = held.get(stored)
            parts = value.named_parameters() if isinstance(value, nn.Module) else [("", value)]
            for own, tensor in parts:
                found.add(".".join(filter(None, (path, stored, own))), tensor)


class _Place(NamedTuple):
    """The bytes that a tensor takes and its layout in them; sorts by storage, then by address."""

    storage: int
    start: int
    end: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    name: str

    @property
    def layout(self) -> object:
        return self[:-1]


def check_memory(model: nn.Module, weights: Sequence[Weight]) -> None:
    """Refuse weights that share memory with other tensors: converting would separate them.

    Parameters with the same memory and the same strides are tied, and stay so.
    """
    for path, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            raise InputError(
                f"{path or 'the model'} is sharded: its weights are pieces of one flat parameter. "
                "Convert the model before it is wrapped."
            )
    for weight in weights:
        if is_traceable_wrapper_subclass(weight.tensor):
            raise InputError(
                f"{weight.name} is {of_kind(weight.tensor.data)}, which lays out its "
                "memory itself. Convert the model before it is sharded or quantized."
            )
    others = (*model.named_parameters(), *model.named_buffers())
    own = {weight.name for weight in weights}
    named = {weight.name: weight.tensor for weight in weights} | dict(others)
    before: _Place | None = None
    for place in sorted(_place(name, t) for name, t in named.items() if _has_memory(t)):
        shared = before is not None and place.storage == before.storage and place.start < before.end
        if before and shared and place.layout != before.layout and own & {place.name, before.name}:
            raise InputError(
                f"{before.name} and {place.name} share memory and do not lie alike in it: "
                "converting would part them. Give one its own: p.data = p.data.clone()."
            )
        if before is None or not shared or place.end > before.end:
            before = place


def _has_memory(tensor: Tensor) -> bool:
    plain = has_strides(tensor) and not is_lazy(tensor)
    return plain and not tensor.is_meta and tensor.numel() > 0


def _place(name: str, tensor: Tensor) -> _Place:
    reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    end = start + (reach + 1) * tensor.element_size()
    storage = tensor.untyped_storage()._cdata
    return _Place(storage, start, end, tuple(tensor.shape), tuple(tensor.stride()), name)
