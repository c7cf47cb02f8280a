"""torch's own module tests: each sample of each module, as it is and inside a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.testing._internal.common_modules import ModuleInfo, module_db
from torch.utils import _pytree as pytree

from .judging import Case
from .opinfo import has_strides, looks, some

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def groups() -> list[str]:
    """`nn.Conv2d float32 eval`: a module, the type of its samples, and how it is asked."""
    return [
        f"{info.name} {str(dtype).removeprefix('torch.')} {mode}"
        for dtype in _DTYPES
        for info in module_db
        if dtype in info.dtypes
        for mode in ("eval", "train")
        if mode == "eval" or info.train_and_eval_differ
    ]


def cases(group: str) -> Iterator[Case]:
    name, kind, mode = group.split()
    info = next(info for info in module_db if info.name == name)
    for number, sample in enumerate(some(_samples(info, getattr(torch, kind), mode))):
        made, given = sample.constructor_input, sample.forward_input
        if given is None:
            continue
        torch.manual_seed(0)
        layer = info.module_cls(*made.args, **made.kwargs).to(getattr(torch, kind))
        layer.train(mode == "train")
        if isinstance(layer, LazyModuleMixin):
            layer(*given.args, **given.kwargs)  # which gives it its weights
        for look, (args, kwargs) in looks((given.args, given.kwargs), name):
            model, inputs = _as_model(layer, args, kwargs)
            strides = has_strides(name, look)
            yield Case(f"{group} {number} {look}", model, inputs, strides=strides)


def _samples(info: ModuleInfo, dtype: torch.dtype, mode: str) -> Iterator[Any]:
    torch.manual_seed(0)
    yield from info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=False, training=mode == "train"
    )


def _as_model(layer: nn.Module, args: Any, kwargs: Any) -> tuple[nn.Module, tuple[Any, ...]]:
    """`layer` with what it was made for: its tensors are inputs, all else is part of the model."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if len(tensors) == len(leaves) == len(args):
        return layer, tuple(args)
    model = _Given(layer, leaves, tree, tensors)
    return model.train(layer.training), tuple(leaves[place] for place in tensors)


class _Given(nn.Module):
    """A layer in a model that knows which of its arguments are inputs."""

    def __init__(self, layer: nn.Module, leaves: list[Any], tree: Any, places: list[int]) -> None:
        super().__init__()
        self.layer = layer
        self._leaves = [None if place in places else leaf for place, leaf in enumerate(leaves)]
        self._tree, self._places = tree, places

    def forward(self, *given: Any) -> Any:
        leaves = list(self._leaves)
        for place, value in zip(self._places, given, strict=True):
            leaves[place] = value
        args, kwargs = pytree.tree_unflatten(leaves, self._tree)
        return self.layer(*args, **kwargs)
