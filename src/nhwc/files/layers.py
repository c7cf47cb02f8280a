"""Write a layer of torch as its class's name and its constructor's arguments, and read it."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from ..errors import of_kind
from ..graph.modules.leaves import runs_hooks
from .plain import Foreign, from_plain, refusal, to_plain
from .vocabulary import module_names, modules

OWN_CODE = "hooks, parametrizations or a forward set from outside, which are code of your own"

_DEPTH = 8
"""The deepest nesting of layers as arguments of layers."""

_LAYERS = 1000
"""The most layers of a recurrent module or an adaptive softmax, whose constructors make them one
by one."""

_BIASED = (nn.modules.batchnorm._NormBase, nn.GroupNorm)
"""Layers that take `bias` from torch 2.12 on, and always had one before."""


def dump_layer(module: nn.Module, path: str) -> dict[str, Any]:
    """The class and the arguments that make this layer; a refusal names it by `path`."""
    layer = _layer_of(module)
    kind = module_names().get(layer)
    if kind is None:
        raise refusal(path, f"it calls {of_kind(module)}, whose own code it takes to load it")
    if runs_hooks(module) or hasattr(module, "parametrizations"):
        raise refusal(path, f"it has {OWN_CODE}")
    arguments = {}
    for name in _arguments_of(layer):
        arguments[name] = _dump_argument(module, name, f"{path}.{name}")
    data = {"class": kind, "arguments": arguments}
    try:
        same = _is_same(module, restore_layer(data))
    except Exception:
        same = False
    if not same:
        raise refusal(path, f"it is no {kind} as its arguments make it: {arguments}")
    return data


def _is_same(module: nn.Module, made: nn.Module) -> bool:
    """Whether `made` has tensors of the same shapes as `module`, and the same plain attributes."""
    shapes = [
        {name: tensor.shape for name, tensor in (*m.named_parameters(), *m.named_buffers())}
        for m in (module, made)
    ]
    plain = (bool, int, float, str, tuple)
    passed = {"training"}
    if getattr(made, "padding_mode", None) == "zeros":
        # What only other modes read. Code that gives a convolution another padding leaves it stale.
        passed.add("_reversed_padding_repeated_twice")
    kept = {n: v for n, v in vars(made).items() if isinstance(v, plain) and n not in passed}
    return shapes[0] == shapes[1] and all(vars(module).get(n) == v for n, v in kept.items())


def _arguments_of(layer: type[nn.Module]) -> list[str]:
    """The names of the constructor's arguments, except `device` and `dtype`."""
    if issubclass(layer, nn.RNNBase):  # Its constructor takes *args, and hands them to its base.
        names = [name for name in nn.RNNBase.__constants__ if name not in ("mode", "proj_size")]
        return names + {nn.LSTM: ["proj_size"], nn.RNN: ["nonlinearity"]}.get(layer, [])
    return [
        name
        for name, parameter in inspect.signature(layer).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name not in ("device", "dtype")
    ]


def _layer_of(module: nn.Module) -> type[nn.Module]:
    """The known class whose code a call of `module` runs; its own if that overrides any of it."""
    kinds = type(module).__mro__
    for number, kind in enumerate(kinds):
        if kind in module_names():
            added = {name for other in kinds[:number] for name in vars(other)}
            own = {name for name in added if not name.startswith("__")} | (added & {"__call__"})
            return type(module) if own & {*dir(kind)} else kind
    return type(module)


def _dump_argument(module: nn.Module, name: str, path: str) -> Any:
    if isinstance(module, nn.MultiheadAttention):
        special = {"bias": "in_proj_bias", "add_bias_kv": "bias_k"}
        if name in special:
            return getattr(module, special[name]) is not None
    value = getattr(module, name, None)
    if isinstance(value, nn.Module):
        return {"module": dump_layer(value, path)}
    if name == "bias":
        return value is not None and value is not False
    return to_plain(value)


def restore_layer(data: dict[str, Any], depth: int = 0) -> nn.Module:
    """The layer that `dump_layer` was given, without values for its parameters."""
    kind = modules()[data["class"]]
    arguments: dict[str, Any] = {}
    for name, value in data["arguments"].items():
        if name not in _arguments_of(kind):
            if name == "bias" and value is True and issubclass(kind, _BIASED):
                continue
            raise Foreign(f"{kind.__name__} with {name[:40]!r}")
        nested = isinstance(value, dict) and "module" in value
        if nested and depth > _DEPTH:
            raise Foreign(f"layers within layers, more than {_DEPTH} deep")
        arguments[name] = (
            restore_layer(value["module"], depth + 1) if nested else from_plain(value, {})
        )
    layers = max(arguments.get("num_layers", 0), len(arguments.get("cutoffs", ())))
    if layers > _LAYERS:
        raise Foreign(f"{layers} layers of {kind.__name__}")
    with torch.device("meta"):
        return kind(**arguments)
