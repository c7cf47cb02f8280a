"""What a case is asked about: each verb of the package, and what others make of its results."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # before each group has a process of its own, which would import it anew
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import nhwc
from nhwc._compile import by_name
from nhwc.models.preserve import copy_as_is
from nhwc.passes import PASSES

from .by_lot import by_lot
from .judging import Case, NothingToAsk, Verb, answer, own


def unlike_a_model(case: Case) -> nn.Module:
    """Shapes are asked of kernels, by the suite itself."""
    raise NothingToAsk


def fused(case: Case) -> nn.Module:
    return nhwc.fuse(case.model, passes=PASSES)


def optimized(case: Case) -> nhwc.Optimized:
    case.made["optimized"] = found = nhwc.optimize(case.model, *case.inputs)
    return found


def planned(case: Case) -> nn.Module:
    """The plan, whether it won or not, with kernels that a lot chose among all that are offered."""
    with by_lot(case.name):
        return nhwc.optimize(case.model, *case.inputs)


def audited(case: Case) -> nn.Module:
    """The model itself, after it was looked at: an audit may change nothing."""
    nhwc.audit(case.model, *case.inputs)
    return copy_as_is(case.model)


def loaded(case: Case) -> nn.Module:
    """The optimized model, saved and read again; optimized again if its plan has layers.

    These come from what is remembered then.
    """
    found = case.made.get("optimized")
    if found is None or any(plan.layers for plan in found.report.plans):
        found = optimized(case)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.nhwc"
        nhwc.save(found, path)
        return nhwc.load(path)


def compiled(case: Case) -> Callable[..., Any]:
    """What the backend makes of the graphs that Dynamo found for the reference."""
    dynamo: _Dynamo = case.made["dynamo"]
    dynamo.planned = True
    return dynamo


class _Dynamo:
    """A compiled copy of a model, whose graphs answer as they are, or as the backend has them."""

    def __init__(self, model: nn.Module) -> None:
        torch.compiler.reset()
        self.planned = False
        self._model = copy_as_is(model)
        self._call = torch.compile(self._model, backend=self._backend)

    def _backend(self, graph: fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        planned = by_name(graph, examples)
        return lambda *inputs: (planned if self.planned else graph)(*inputs)

    def __call__(self, *inputs: Any) -> Any:
        """Answer, and leave the model as it was: the next call is to begin with the same."""
        state = [(x, x.detach().clone()) for x in _tensors_of(self._model)]
        try:
            return self._call(*inputs)
        finally:
            for x, before in state:
                if not torch.equal(x.nan_to_num(), before.nan_to_num()):
                    x.detach().copy_(before)


def _of_dynamo(case: Case) -> Callable[..., Any]:
    """What Dynamo answers by itself; nothing is asked where it breaks on what the model refuses.

    Nor is anything asked of a model without weights: the backend leaves its graphs to Dynamo.
    """
    if not _tensors_of(case.model):
        raise NothingToAsk
    case.made["dynamo"] = call = _Dynamo(case.model)

    def asked(*inputs: Any) -> Any:
        given = own(inputs)
        try:
            return call(*inputs)
        except IndexError as error:
            own_error = answer(copy_as_is(case.model), given).error
            if own_error is None or isinstance(own_error, IndexError):
                raise
            raise NothingToAsk from error

    return asked


def _tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def scripted(case: Case) -> Callable[..., Any]:
    return torch.jit.script(fused(case))  # type: ignore[no-any-return]


def traced(case: Case) -> nn.Module:
    return fx.symbolic_trace(fused(case))


def looked_at_backwards(case: Case) -> Callable[..., Any]:
    inputs = own(case.inputs)
    for x in pytree.tree_leaves(inputs):
        if isinstance(x, Tensor) and _has_gradients(x):
            x.requires_grad_()
    nhwc.audit(case.model, *inputs, backward=True)
    return gradients(copy_as_is(case.model))


def gradients(call: Callable[..., Any]) -> Callable[..., Any]:
    """What flows back to the inputs of `call`."""

    def backwards(*inputs: Any) -> list[Tensor | None]:
        leaves = pytree.tree_leaves(inputs)
        asked = [x for x in leaves if isinstance(x, Tensor) and _has_gradients(x)]
        with torch.enable_grad():
            for x in asked:
                x.requires_grad_()
            try:
                found = call(*inputs)
                outputs = [y for y in pytree.tree_leaves(found) if _has_history(y)]
                if not asked or not outputs:
                    raise NothingToAsk
                weights = [_cotangent(y) for y in outputs]
                return list(torch.autograd.grad(outputs, asked, weights, allow_unused=True))
            finally:
                for x in asked:
                    if x.is_leaf:
                        x.requires_grad_(False)

    return backwards


def _of_eager(case: Case) -> Callable[..., Any]:
    """The gradients of the model as it is; nothing is asked where torch gives none."""
    call = gradients(copy_as_is(case.model))

    def asked(*inputs: Any) -> Any:
        try:
            return call(*inputs)
        except Exception as error:
            raise NothingToAsk from error

    return asked


def _has_gradients(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _has_history(y: Any) -> bool:
    return isinstance(y, Tensor) and y.requires_grad


def _cotangent(y: Tensor) -> Tensor:
    """Numbers that differ from place to place, the same for each result of this shape."""
    return torch.linspace(0.5, 1.5, y.numel()).to(y.dtype).reshape(y.shape)


VERBS = {
    "kernels": Verb(unlike_a_model),
    "audit": Verb(audited),
    "fuse": Verb(fused),
    "optimize": Verb(optimized),
    "plan": Verb(planned),
    "load": Verb(loaded),
    "compile": Verb(compiled, _of_dynamo),
    "script": Verb(scripted, lambda case: torch.jit.script(case.model)),
    # FX leaves what it traces in what a model keeps of its calls.
    "trace": Verb(traced, lambda case: fx.symbolic_trace(copy_as_is(case.model))),
    "audit backwards": Verb(looked_at_backwards, _of_eager, gradients, strides=False),
    "gradients": Verb(lambda case: gradients(fused(case)), _of_eager, gradients, strides=False),
}
"""Those that may have nothing to ask stand last: what ends a process is told of the first left."""

USUAL = ("audit", "fuse", "optimize", "load", "compile", "audit backwards", "gradients")
"""The verbs that a suite asks if it does not say."""
