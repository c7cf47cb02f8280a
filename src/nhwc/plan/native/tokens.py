"""Our kernels for operators on tokens, by what a node calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import fx

from ...graph.mended import Attention, SpelledAttention
from ...graph.ordered import Reduced, Softmax
from ...kernels.layers.elementwise import add_step, divide_step, multiply_step
from ...kernels.layers.normalize import softmax_step
from ...kernels.layers.unit import unit_step
from ...operators.kinds import arithmetic_of
from ..implementation import Implementation
from ..recognize import is_layer_norm
from ..recording import Record
from ..specs import Layer
from .arithmetic import activating, squaring, with_number
from .attending import packed_attention, spelled_attention, torchs_attention
from .calls import OperatorCall, bound
from .moves import moving
from .norms import norm_step, unit_eps
from .products import matrix_product, with_number_of_row
from .rows import concatenated, mean_of_tokens, pointwise, rowwise, scaled


def tokens(graph: fx.GraphModule, record: Record, layer: Layer) -> Implementation | None:
    """Our kernel for an operator on tokens: rows in batches, or images whose channels are last."""
    found = moving(graph, record, layer)
    if found is not None or isinstance(record.values[layer.node], tuple):
        return found
    return _TokensCall(graph, record, layer).implementation()


class _TokensCall(OperatorCall):
    """The call that a node makes on tokens, and our kernel for it."""

    def implementation(self) -> Implementation | None:
        record, layer, module = self.record, self.layer, self.module
        if module is not None:
            if module._forward_hooks or module._forward_pre_hooks:
                return None
            if type(module) is Attention:
                return packed_attention(record, layer, module)
            if type(module) is SpelledAttention:
                return spelled_attention(record, layer, module)
            if is_layer_norm(module):
                whole = tuple(module.normalized_shape) == self.out.shape[-1:]
                return rowwise(record, layer, norm_step(module)) if whole else None
            if isinstance(module, Softmax) and not module.logarithm:
                return self._softmax_of(module.dim)
            if isinstance(module, Reduced):
                plain = module.kind == "mean"
                return self._mean_over(module.dims) if plain else None
            return self._each_number(activating(self))
        named: dict[str, Callable[[], Implementation | None]] = {
            "add": self._sum,
            "mul": self._product,
            "sub": lambda: self._each_number(with_number(self, sign=-1)),
            "div": self._quotient,
            **dict.fromkeys(("pow", "square"), lambda: self._each_number(squaring(self))),
            "matmul": lambda: matrix_product(record, layer),
            "bmm": lambda: matrix_product(record, layer),
            "normalize": self._unit_rows,
            **dict.fromkeys(("cat", "concat"), self._joined),
            "mean": lambda: self._mean_over(bound(self.node, ("input", "dim")).get("dim")),
            "softmax": self._function_softmax,
            "scaled_dot_product_attention": lambda: torchs_attention(record, layer),
        }
        find = named.get(arithmetic_of(self.name) or self.name)
        if find is not None:
            return find()
        return self._each_number(activating(self))

    def _each_number(self, make: Any) -> Implementation | None:
        return pointwise(self.record, self.layer, make) if make else None

    def _sum(self) -> Implementation | None:
        """Two tensors, one of which may be of fewer numbers, or a tensor and a number."""
        if not self.two():
            return self._each_number(with_number(self, sign=1))
        by_row = self._with_number_of_row("sum")
        if by_row is not None:
            return by_row
        whole = self.out.shape in [self.record.values[one].shape for one in self.layer.inputs]
        return self._each_number(add_step) if whole else None

    def _product(self) -> Implementation | None:
        if not self.two():
            return self._each_number(with_number(self, power=1))
        out, shapes = self.out.shape, [self.seen(0).shape, self.seen(1).shape]
        if shapes == [out, out]:
            return self._each_number(multiply_step)
        factors = next((shape for shape in shapes if shape != out), out)
        each_channel = math.prod(factors) == factors[-1] == out[-1]
        if out in shapes and each_channel:
            return scaled(self.record, self.layer)
        return self._with_number_of_row("product")

    def _quotient(self) -> Implementation | None:
        if not self.two():
            return self._each_number(with_number(self, power=-1))
        shapes = [self.seen(0).shape, self.seen(1).shape]
        if shapes == [self.out.shape] * 2:
            return self._each_number(divide_step)
        return self._with_number_of_row("quotient")

    def _with_number_of_row(self, kind: str) -> Implementation | None:
        same = self.seen(0).shape == self.seen(1).shape
        return None if same else with_number_of_row(self.record, self.layer, kind)

    def _unit_rows(self) -> Implementation | None:
        """`F.normalize` over the last dimension."""
        eps = unit_eps(self)
        dim = bound(self.node, ("input", "p", "dim")).get("dim", 1)
        if eps is None or dim not in (-1, len(self.out.shape) - 1):
            return None
        return rowwise(self.record, self.layer, lambda x, y: unit_step(x, y, eps=eps))

    def _joined(self) -> Implementation | None:
        given = bound(self.node, ("tensors", "dim"))
        parts, dim = given["tensors"], given.get("dim", given.get("axis", 0))
        if not isinstance(parts, (tuple, list)) or not isinstance(dim, int):
            return None
        alike = all(len(self.record.values[one].shape) == len(self.out.shape) for one in parts)
        return concatenated(self.record, self.layer, parts, dim) if alike else None

    def _function_softmax(self) -> Implementation | None:
        given = bound(self.node, ("input", "dim"))
        return self._softmax_of(given.get("dim")) if given.keys() <= {"input", "dim"} else None

    def _softmax_of(self, dim: Any) -> Implementation | None:
        if dim not in (-1, len(self.out.shape) - 1):
            return None
        return rowwise(self.record, self.layer, softmax_step)

    def _mean_over(self, dims: Any) -> Implementation | None:
        """The mean over all dimensions but the first and the last."""
        rank = len(self.seen(0).shape)
        dims = (dims,) if isinstance(dims, int) else dims
        if not isinstance(dims, (tuple, list)) or not all(type(dim) is int for dim in dims):
            return None
        between = sorted(dim % rank for dim in dims) == [*range(1, rank - 1)]
        return mean_of_tokens(self.record, self.layer) if between and rank > 2 else None
