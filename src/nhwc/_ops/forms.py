"""The forms of an operator: as a function, in place, its gradient, with `out=`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..models.trees import tensors_of
from .samples import Layout, Sample, arrange, can_tell


@dataclass(frozen=True)
class Prepared:
    """A call ready to be made, and the tensors that were laid out for it."""

    call: Callable[[], list[Tensor]]
    laid: list[Tensor]


Form = Callable[[Sample, Layout], Prepared]
"""One form of an operator: as a function, in place, its gradient, or with `out=`."""


def forward(sample: Sample, layout: Layout) -> Prepared:
    args, kwargs, laid = arrange(sample, layout, grad=False)
    return Prepared(lambda: tensors_of(sample.call(*args, **kwargs)), laid)


def in_place(sample: Sample, layout: Layout) -> Prepared:
    assert sample.inplace is not None
    return forward(replace(sample, call=sample.inplace), layout)


def backward(sample: Sample, layout: Layout) -> Prepared:
    """Prepare the gradients of the inputs, given gradients of the results in the same layout.

    `autograd.grad` is called rather than `backward`, which would restride the gradients.
    """
    args, kwargs, laid = arrange(sample, layout, grad=True)
    with torch.enable_grad():
        results = [r for r in tensors_of(sample.call(*args, **kwargs)) if r.requires_grad]
    wanted = [t for t in tensors_of((args, kwargs)) if t.requires_grad]
    given = [_gradient_like(result, layout) for result in results]

    def call() -> list[Tensor]:
        grads = torch.autograd.grad(results, wanted, given, allow_unused=True)
        return [grad for grad in grads if grad is not None]

    return Prepared(call, [*laid, *given])


def _gradient_like(result: Tensor, layout: Layout) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    kind = torch.float64 if not result.is_complex() else torch.complex128
    values = torch.rand(result.shape, generator=generator, dtype=kind).to(result)
    return layout(values, 0) if can_tell(values) else values


def with_out(results: Sequence[Tensor], target: Layout) -> Form:
    """Return the form that writes into `out=` tensors laid out by `target`."""

    def form(sample: Sample, layout: Layout) -> Prepared:
        args, kwargs, laid = arrange(sample, layout, grad=False)
        empty = [torch.zeros_like(result) for result in results]
        outs = [target(out, 0) if can_tell(out) else out for out in empty]
        kwargs = {**kwargs, "out": outs[0] if len(outs) == 1 else tuple(outs)}

        def call() -> list[Tensor]:
            sample.call(*args, **kwargs)
            return outs

        return Prepared(call, laid)

    return form
