"""The first step of somebody else's training loop, audited while it runs.

Nothing runs twice: operators are recorded in the loop's own forward pass, gradients by hooks on
the graph of its own backward pass, and the optimizer's state after its own first update.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..displayed import Displayed
from ..formats import CHANNELS_LAST_OF, format_of
from ..formats.weights import convolution_weights
from ..machine.environment import Environment
from ..models.trees import every_tensor_of, tensors_of
from ..watch.gradients import Gradients
from ..watch.recorder import Recorder
from . import Audit, judged, sorted_by_weight
from .findings import Finding

_NOT_TIMED = (
    "times, and copies inside of kernels: the first step is not run under a profiler, as "
    "nhwc.audit(model, batch, backward=True) does"
)


@dataclass(frozen=True)
class FirstStep(Displayed):
    """What the first training step did to memory formats."""

    audit: Audit
    """The forward and the backward pass; without calls where they could not be seen."""
    weights: int
    """How many weights of convolutions are channels last."""
    gradients: tuple[str, ...]
    """The weights whose gradient had another format than they have."""
    states: tuple[str, ...]
    """The weights for which the optimizer keeps numbers in another format."""
    checked: int
    """How many gradients of images' weights were looked at."""

    @property
    def backward(self) -> tuple[Finding, ...]:
        """The findings of the backward pass."""
        return tuple(f for f in self.audit.findings if f.calls and self._is_backward(f))

    @property
    def clean(self) -> bool:
        return not (self.audit.lost or self.gradients or self.states)

    def _is_backward(self, finding: Finding) -> bool:
        first = finding.calls[0]
        return next(c.backward for c in self.audit.calls if c.index == first)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "schema": 1, "audit": self.audit.to_dict()}


class StepWatch:
    """Watches a model until its weights are updated for the first time.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).to(memory_format=torch.channels_last)
    >>> watch, optimizer = StepWatch(net), torch.optim.SGD(net.parameters(), lr=0.1)
    >>> with watch.forward() as made:
    ...     made.append(net(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)).sum())
    >>> made[0].backward()
    >>> optimizer.step()
    >>> watch.result([optimizer]).clean
    True
    """

    def __init__(self, model: nn.Module, name: str = "") -> None:
        self.model = model
        self.name = name or type(model).__name__
        self.unseen = [_NOT_TIMED]
        self._recorder = Recorder(model)
        self._handles: list[Any] = []
        self._inputs: tuple[tuple[int, ...], ...] = ()
        self._seconds = 0.0

    @contextlib.contextmanager
    def forward(self, inputs: object = ()) -> Iterator[list[Any]]:
        """Record the forward pass; its results, put into the list, lead to the backward pass."""
        results: list[Any] = []
        self._inputs = tuple(tuple(tensor.shape) for tensor in every_tensor_of(inputs))
        start = time.perf_counter()
        with self._recorder:
            yield results
        self._seconds = time.perf_counter() - start
        made = every_tensor_of(results)
        self._handles = Gradients(self._recorder, made).handles

    def result(self, optimizers: Iterable[Optimizer]) -> FirstStep:
        """Judge what was seen. To be called after an update, while the gradients are there."""
        for handle in self._handles:
            handle.remove()
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        last = [p for p in self.model.parameters() if _is_last(p)]
        graded = [p for p in last if p.grad is not None]
        return FirstStep(
            audit=self._audit(),
            weights=sum(_is_last(weight.tensor) for weight in convolution_weights(self.model)),
            gradients=tuple(names[id(p)] for p in graded if _differs(p.grad, p)),
            states=tuple(names[id(p)] for p in last if _differs_in_state(p, optimizers)),
            checked=len(graded),
        )

    def _audit(self) -> Audit:
        calls = sorted(self._recorder.calls, key=lambda call: call.index)
        seconds = self._seconds or float("inf")
        outcomes, findings = judged(calls, self.model, seconds)
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        return Audit(
            model=self.name,
            inputs=self._inputs,
            calls=tuple(calls),
            outcomes=tuple(outcomes),
            findings=sorted_by_weight(findings),
            run_s=self._seconds,
            converted=False,
            unseen=tuple(self.unseen),
            environment=Environment.here(device),
        )


def _is_last(weight: Tensor) -> bool:
    own = CHANNELS_LAST_OF.get(weight.ndim)
    return own is not None and format_of(weight, hint=own) is own


def _differs(tensor: Tensor | None, weight: Tensor) -> bool:
    """Whether a tensor of a weight's shape is not channels last, as the weight is."""
    if tensor is None or tensor.shape != weight.shape:
        return False
    own = CHANNELS_LAST_OF[weight.ndim]
    return format_of(tensor, hint=own) is not own


def _differs_in_state(weight: Tensor, optimizers: Iterable[Optimizer]) -> bool:
    kept = [tensor for one in optimizers for tensor in tensors_of(one.state.get(weight, {}))]
    return any(_differs(tensor, weight) for tensor in kept)
