"""torch's own operator tests: each sample of each operator, as a model that does nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import make_tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from .judging import Case

_DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16)

UNSET = {
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "empty_permuted",
}

_MENDED = {
    "nn_functional_grid_sample",
    "nn_functional_instance_norm",
    "nn_functional_pad_circular",
    "nn.CircularPad2d",
    "nn.InstanceNorm2d",
    "nn.LazyInstanceNorm2d",
}
"""In channels last eager loses the format, and a pass keeps it."""

_ASTRAY = {"grid_sampler_2d", "nn_functional_grid_sample"}
"""Backwards torch reads memory of others where a grid is not finite, and the process ends."""

_MOST = 24
"""How many samples are taken."""


def groups() -> list[str]:
    """`add float32`: an operator and the type of its samples."""
    return [
        f"{op.formatted_name} {str(dtype).removeprefix('torch.')}"
        for dtype in _DTYPES
        for op in op_db
        if dtype in op.dtypes
    ]


def cases(group: str) -> Iterator[Case]:
    name, kind = group.split()
    op = next(op for op in op_db if op.formatted_name == name)
    dtype = getattr(torch, kind)
    samples = op.sample_inputs("cpu", dtype)
    for number, sample in enumerate(some(samples)):
        values = (sample.input, sample.args, sample.kwargs)
        for way, call in _ways(op):
            for look, changed in looks(values, name):
                model, inputs = as_model(call, changed)
                told = f"{group} {number} {way} {look}"
                strides = has_strides(name, look)
                yield Case(told, model, inputs, name in UNSET, is_steep(name), strides)
    if op.error_inputs_func is not None and dtype == torch.float32:
        for number, wrong in enumerate(some(op.error_inputs("cpu"))):
            sample = wrong.sample_input
            model, inputs = as_model(op.op, (sample.input, sample.args, sample.kwargs))
            yield Case(f"{group} error {number}", model, inputs, True)


def has_strides(name: str, look: str) -> bool:
    """Whether the result of this operator, or module, must have eager's strides."""
    return name not in _MENDED or look != "channels last"


def is_steep(name: str) -> bool:
    """Whether this operator decomposes or inverts."""
    return name.startswith(("linalg", "svd", "pca", "geqrf", "symeig", "ormqr", "lu", "qr", "pinv"))


def some(samples: Any) -> Iterator[Any]:
    """The first samples: a few operators and modules have thousands, which differ in little."""
    for _, sample in zip(range(_MOST), samples, strict=False):
        yield sample


def _ways(op: Any) -> Iterator[tuple[str, Any]]:
    yield "function", op.op
    if op.method_variant is not None and op.method_variant is not op.op:
        yield "method", op.method_variant
    if op.inplace_variant is not None:
        yield "in-place", op.inplace_variant


def looks(values: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The same values as they are, with gaps, channels last, and with some that are not finite.

    The last only if the operator, or module, of this name bears it.
    """
    yield "plain", values
    yield "strided", pytree.tree_map_only(Tensor, _strided, values)
    if any(isinstance(leaf, Tensor) and leaf.dim() == 4 for leaf in pytree.tree_leaves(values)):
        yield "channels last", pytree.tree_map_only(Tensor, _channels_last, values)
    floating = any(_is_float(leaf) for leaf in pytree.tree_leaves(values))
    if floating and name not in _ASTRAY:
        yield "not finite", pytree.tree_map_only(Tensor, _not_finite, values)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0


def _strided(x: Tensor) -> Tensor:
    """`x` with a gap after each element."""
    if x.layout != torch.strided or x.dim() == 0 or x.is_conj():
        return x
    wide = make_tensor((*x.shape, 2), dtype=x.dtype, device="cpu")
    wide[..., 0] = x.detach()
    return wide[..., 0]


def _channels_last(x: Tensor) -> Tensor:
    four = x.layout == torch.strided and x.dim() == 4
    return x.detach().clone(memory_format=torch.channels_last) if four else x


def _not_finite(x: Tensor) -> Tensor:
    """`x` with a NaN and an infinity at places that depend on its size alone."""
    if not _is_float(x) or x.layout != torch.strided:
        return x
    changed = x.detach().clone()
    flat = changed.view(-1) if changed.is_contiguous() else changed.flatten()
    flat[0], flat[-1] = float("inf"), float("nan")
    return flat.view(x.shape)


def as_model(call: Any, values: tuple[Any, Any, Any]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model that makes this call, with the first tensors in it as its inputs."""
    leaves, tree = pytree.tree_flatten(values)
    tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    passed = tensors[: len(_MODELS) - 1]
    model = _MODELS[len(passed)](call, leaves, tree, passed)
    return model.eval(), tuple(leaves[place].detach() for place in passed)


class _Calls(nn.Module):
    def __init__(self, call: Any, leaves: list[Any], tree: Any, passed: list[int]) -> None:
        super().__init__()
        self._function, self._leaves, self._tree, self._passed = call, leaves, tree, passed

    def _call(self, *given: Any) -> Any:
        leaves = list(self._leaves)
        for place, value in zip(self._passed, given, strict=True):
            leaves[place] = value
        first, args, kwargs = pytree.tree_unflatten(leaves, self._tree)
        return self._function(first, *args, **kwargs)


class _NoInput(_Calls):
    def forward(self) -> Any:
        return self._call()


class _OneInput(_Calls):
    def forward(self, a: Any) -> Any:
        return self._call(a)


class _TwoInputs(_Calls):
    def forward(self, a: Any, b: Any) -> Any:
        return self._call(a, b)


class _ThreeInputs(_Calls):
    def forward(self, a: Any, b: Any, c: Any) -> Any:
        return self._call(a, b, c)


class _FourInputs(_Calls):
    def forward(self, a: Any, b: Any, c: Any, d: Any) -> Any:
        return self._call(a, b, c, d)


_MODELS = (_NoInput, _OneInput, _TwoInputs, _ThreeInputs, _FourInputs)
