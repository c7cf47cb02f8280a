"""torch's own operator tests, with a model that holds all tensors but the first as its weights.

Among them are the filters of convolutions, the scales of norms and the tables of embeddings: what a
pass folds, a kernel packs, and a file keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import SampleInput
from torch.utils import _pytree as pytree

from .judging import Case
from .opinfo import UNSET, has_strides, is_steep, looks, some

_DTYPES = (torch.float32, torch.bfloat16)


def groups() -> list[str]:
    """`mul float32`: an operator that takes a second tensor, and the type of its samples."""
    return [
        f"{op.formatted_name} {str(dtype).removeprefix('torch.')}"
        for dtype in _DTYPES
        for op in op_db
        if dtype in op.dtypes and any(map(_has_weights, some(op.sample_inputs("cpu", dtype))))
    ]


def cases(group: str) -> Iterator[Case]:
    name, kind = group.split()
    op = next(op for op in op_db if op.formatted_name == name)
    for number, sample in enumerate(some(op.sample_inputs("cpu", getattr(torch, kind)))):
        if not _has_weights(sample):
            continue
        values = (sample.input, sample.args, sample.kwargs)
        for look, (first, args, kwargs) in looks(values, name):
            model = _Weighted(op.op, args, kwargs).eval()
            told = f"{group} {number} {look}"
            yield Case(
                told,
                model,
                (first.detach(),),
                name in UNSET,
                is_steep(name),
                has_strides(name, look),
            )


def _has_weights(sample: SampleInput) -> bool:
    rest = pytree.tree_leaves((sample.args, sample.kwargs))
    return isinstance(sample.input, Tensor) and any(isinstance(x, Tensor) for x in rest)


class _Weighted(nn.Module):
    """A call of one input; the tensors among the other arguments are parameters and buffers."""

    def __init__(self, call: Any, args: Any, kwargs: Any) -> None:
        super().__init__()
        self._call = call
        leaves, self._tree = pytree.tree_flatten((args, kwargs))
        self._rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._names = {}
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                self._names[place] = f"weight{place}"
                self._keep(f"weight{place}", leaf.detach())

    def _keep(self, name: str, value: Tensor) -> None:
        if value.is_floating_point():
            self.register_parameter(name, nn.Parameter(value))
        else:
            self.register_buffer(name, value)

    def forward(self, x: Any) -> Any:
        leaves = list(self._rest)
        for place, name in self._names.items():
            leaves[place] = getattr(self, name)
        args, kwargs = pytree.tree_unflatten(leaves, self._tree)
        return self._call(x, *args, **kwargs)
