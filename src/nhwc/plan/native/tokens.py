"""Our kernels for operators on tokens, by what a node calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import fx, nn

from ...graph import bound
from ...graph.modules.leaves import runs_hooks
from ...graph.modules.mended import (
    Attention,
    Cat,
    GridSample,
    Recurrent,
    SpelledAttention,
    SpelledNorm,
    WeightedSamples,
)
from ...graph.modules.ordered import Reduced, Softmax
from ...kernels.layers.choosing import chosen_step
from ...kernels.layers.elementwise import add_step, each_step, multiply_step
from ...kernels.programs.moved import rows_of
from ...kernels.tape.steps import Step
from ...operators.kinds import arithmetic_of
from ..implementation import Implementation
from ..recognize import normalizes_rows
from ..recording import Record
from ..specs import Layer
from .arithmetic import (
    CHOICES,
    MARKS,
    activating,
    comparing,
    negated_step,
    product_added,
    replacing,
    squaring,
    subtract_step,
    with_number,
)
from .attending import packed_attention, spelled_attention, torchs_attention
from .calls import Lowered, OperatorCall
from .folding import fold
from .moves import moving
from .norms import norm_step, root_step, softmax_like, spelled_step, unit_along, unit_eps
from .padded import padded
from .products import matrix_product, pair_product, with_number_of_row
from .recurrent import recurrent
from .reducing import KINDS, reduced
from .rows import concatenated, pointwise, repeated, rowwise, scaled
from .sampling import sampled, weighted_samples
from .signals import signals
from .writes import put_in

_OF_SOFTMAX = ("input", "dim", "dtype", "_stacklevel")


def tokens(graph: fx.GraphModule, record: Record, layer: Layer) -> Lowered:
    """Our kernel for an operator on tokens: rows in batches, or images whose channels are last."""
    found = moving(graph, record, layer)
    if found is not None or isinstance(record.values[layer.node], tuple):
        return found
    call = _TokensCall(graph, record, layer)
    return signals(call) or call.implementation()


class _TokensCall(OperatorCall):
    """The call that a node makes on tokens, and our kernel for it."""

    def implementation(self) -> Implementation | None:
        return self._of_function() if self.module is None else self._of_module(self.module)

    def _of_module(self, module: Any) -> Implementation | None:
        record, layer = self.record, self.layer
        if runs_hooks(module):
            return None
        if type(module) is Attention:
            return packed_attention(record, layer, module)
        if type(module) is SpelledAttention:
            return spelled_attention(record, layer, module)
        if normalizes_rows(module):
            whole = tuple(module.normalized_shape) == self.out.shape[-1:]
            return rowwise(record, layer, norm_step(module)) if whole else None
        if type(module) is SpelledNorm:
            step = spelled_step(self)
            return rowwise(record, layer, step, module.dim) if step else None
        if type(module) in (nn.Softmax, nn.LogSoftmax):
            return self._softmax_of(module.dim, type(module) is nn.LogSoftmax)
        if isinstance(module, Softmax):
            return self._softmax_of(module.dim, module.logarithm)
        if type(module) is Recurrent:
            return recurrent(self)
        if type(module) is GridSample:
            return sampled(self)
        if type(module) is WeightedSamples:
            return weighted_samples(self)
        if type(module) is nn.Fold:
            return fold(self)
        if isinstance(module, Reduced):
            return self._reduced(module.kind, module.dims, keepdim=module.keepdim)
        if isinstance(module, Cat):
            return self._joined(module.dim)
        return self._each_number(activating(self))

    def _of_function(self) -> Implementation | None:
        find = _BY_NAME.get(arithmetic_of(self.name) or self.name)
        return self._each_number(activating(self)) if find is None else find(self)

    def _each_number(self, make: Any) -> Implementation | None:
        return pointwise(self.record, self.layer, make) if make else None

    def _sum(self) -> Implementation | None:
        """Two tensors, one of which may be of fewer numbers, or a tensor and a number."""
        if not self.two():
            return self._each_number(with_number(self, sign=1))
        return self._of_rows("sum", add_step)

    def _difference(self) -> Implementation | None:
        if not self.two():
            return self._each_number(with_number(self, sign=-1))
        return self._of_rows("difference", subtract_step)

    def _product(self) -> Implementation | None:
        if not self.two():
            return self._each_number(with_number(self, power=1))
        out, shapes = self.out.shape, [self.seen(0).shape, self.seen(1).shape]
        if shapes == [out, out]:
            return self._each_number(multiply_step)
        factors = next((shape for shape in shapes if shape != out), out)
        each_channel = math.prod(factors) == rows_of(factors)[1] == out[-1]
        if out in shapes and each_channel:
            return scaled(self.record, self.layer)
        return self._of_rows("product", multiply_step)

    def _quotient(self) -> Implementation | None:
        if not self.two():
            return self._each_number(with_number(self, power=-1))
        shapes = [self.seen(0).shape, self.seen(1).shape]
        if shapes == [self.out.shape] * 2:
            return self._of_each("quotient")
        return self._of_rows("quotient", partial(each_step, kind="quotient"))

    def _of_each(self, kind: str) -> Implementation | None:
        return self._each_number(partial(each_step, kind=kind)) if self.two() else None

    def _product_added(self) -> Implementation | None:
        """`torch.addcmul` of three tensors: the second times the third, and the first."""
        plain = len(self.node.args) == 3 and not self.node.kwargs
        return self._each_number(product_added) if plain else None

    def _of_rows(self, kind: str, each: Callable[..., Step]) -> Implementation | None:
        """Two tensors, of which one may have a number for each row of the other."""
        same = self.seen(0).shape == self.seen(1).shape
        by_row = None if same else with_number_of_row(self.record, self.layer, kind, each)
        return by_row or self._each_number(each)

    def _unit_rows(self) -> Implementation | None:
        """`F.normalize` over one dimension."""
        eps = unit_eps(self)
        dim = bound(self.node, ("input", "p", "dim")).get("dim", 1)
        if eps is None or type(dim) is not int:
            return None
        return unit_along(self.record, self.layer, dim, eps)

    def _over_root(self) -> Implementation | None:
        """`over_root_mean_square` of each row of one dimension."""
        _, dim, eps = self.node.args
        return rowwise(self.record, self.layer, root_step(eps), dim)  # type: ignore[arg-type]

    def _joined(self, along: int = 0) -> Implementation | None:
        given = bound(self.node, ("tensors", "dim"))
        parts, dim = given["tensors"], given.get("dim", given.get("axis", along))
        if not isinstance(parts, (tuple, list)) or not isinstance(dim, int):
            return None
        alike = all(len(self.record.values[one].shape) == len(self.out.shape) for one in parts)
        return concatenated(self.record, self.layer, parts, dim) if alike else None

    def _stacked(self) -> Implementation | None:
        given = bound(self.node, ("tensors", "dim"))
        parts, dim = given["tensors"], given.get("dim", 0)
        if not isinstance(parts, (tuple, list)) or type(dim) is not int or "out" in given:
            return None
        return concatenated(self.record, self.layer, parts, dim, stacked=True)

    def _function_softmax(self) -> Implementation | None:
        given = bound(self.node, ("input", "dim"))
        # `F.softmax` hands these on to itself.
        same = given.get("dtype") in (None, self.seen(0).dtype)
        plain = same and given.keys() <= {*_OF_SOFTMAX}
        return self._softmax_of(given.get("dim"), self.name == "log_softmax") if plain else None

    def _softmax_of(self, dim: Any, logarithm: bool) -> Implementation | None:
        if type(dim) is not int:
            return None
        return rowwise(self.record, self.layer, softmax_like(logarithm), dim)

    def _function_reduced(self) -> Implementation | None:
        given = bound(self.node, ("input", "dim", "keepdim"))
        if not given.keys() <= {"input", "dim", "keepdim"}:
            return None
        return self._reduced(self.name, given.get("dim"), keepdim=given.get("keepdim", False))

    def _reduced(self, kind: str, dims: Any, *, keepdim: Any) -> Implementation | None:
        return reduced(self.record, self.layer, kind, dims, keepdim=keepdim)


_BY_NAME: dict[str, Callable[[_TokensCall], Implementation | None]] = {
    "add": _TokensCall._sum,
    "mul": _TokensCall._product,
    "sub": _TokensCall._difference,
    **dict.fromkeys(("neg", "negative"), lambda call: call._each_number(negated_step)),
    "div": _TokensCall._quotient,
    "maximum": lambda call: call._of_each("larger"),
    "minimum": lambda call: call._of_each("smaller"),
    "addcmul": _TokensCall._product_added,
    "compared": lambda call: call._each_number(comparing(call)),
    **dict.fromkeys(MARKS, lambda call: call._each_number(replacing(call))),
    **dict.fromkeys(CHOICES, lambda call: call._each_number(chosen_step)),
    **dict.fromkeys(("pow", "square"), lambda call: call._each_number(squaring(call))),
    **dict.fromkeys(("matmul", "bmm"), lambda call: matrix_product(call.record, call.layer)),
    "linear": lambda call: matrix_product(call.record, call.layer, transposed=True),
    "einsum": lambda call: pair_product(call.record, call.layer),
    "normalize": _TokensCall._unit_rows,
    "over_root_mean_square": _TokensCall._over_root,
    **dict.fromkeys(("cat", "concat", "concatenate"), _TokensCall._joined),
    "stack": _TokensCall._stacked,
    "pad": padded,
    "fold": fold,
    "slice_scatter": put_in,
    "select_scatter": put_in,
    "as_elements": lambda call: repeated(call.record, call.layer),
    **dict.fromkeys(KINDS, _TokensCall._function_reduced),
    **dict.fromkeys(("softmax", "log_softmax"), _TokensCall._function_softmax),
    "scaled_dot_product_attention": lambda call: torchs_attention(call.record, call.layer),
}
"""How the kernel for a function is found, by its name."""
