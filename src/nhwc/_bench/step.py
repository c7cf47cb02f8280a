"""One training step: forward, loss, backward, optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..models.trees import every_tensor_of

_SCALES = 12
"""Scales of a loss that are tried, each half the one before."""


class StepCall:
    """A training step of `model`, run as `function`, which may be a compiled form of it.

    The loss is cross entropy against random classes, summed over the outputs. Mixed precision is
    bfloat16 on a CPU, and float16 with a scaled loss on CUDA.
    """

    def __init__(
        self,
        model: nn.Module,
        function: Callable[..., Any],
        inputs: tuple[Tensor, ...],
        *,
        amp: bool = False,
    ) -> None:
        self.model, self.function, self.inputs, self.amp = model.train(), function, inputs, amp
        self.device = inputs[0].device.type
        # The rate is so small that weights barely move: each step costs the same, none overflows.
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-7, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cuda", enabled=amp and self.device == "cuda")

    def __call__(self) -> Tensor:
        with autocast(self.device, self.amp):
            loss = _loss(self.function(*self.inputs))
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def check(self) -> list[Tensor]:
        """Take one step without dropout; return the loss and the norm of all gradients.

        A scale at which a gradient overflows makes no step: the next one tries a smaller scale.
        """
        with without_dropout(self.model):
            for _ in range(_SCALES):
                loss, norm = self(), self._norm()
                if norm.isfinite() or not self.scaler.is_enabled():
                    break
        return [loss.double(), norm]

    def _norm(self) -> Tensor:
        """The norm of all gradients, which the scaler's step left without its scale."""
        grads = [p.grad.double() for p in self.model.parameters() if p.grad is not None]
        norm: Tensor = torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))
        return norm


def autocast(device: str, enabled: bool) -> torch.autocast:
    """Autocast to the dtype usual on the device: float16 on CUDA, bfloat16 elsewhere."""
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    return torch.autocast(device, dtype=dtype, enabled=enabled)


@contextlib.contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Switch off random layers: they draw in the order of memory, so layouts would disagree."""
    random = ("dropout", "droppath", "stochasticdepth", "dropblock")
    found = [
        module
        for module in model.modules()
        if module.training and any(word in type(module).__name__.lower() for word in random)
    ]
    try:
        for module in found:
            module.training = False
        yield
    finally:
        for module in found:
            module.training = True


def _loss(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        if not output.is_floating_point() or output.ndim < 2:
            return output.float().square().mean()
        wide = output if output.dtype == torch.float64 else output.float()
        shape = (wide.shape[0], *wide.shape[2:])
        # A generator of its own gives every variant the same classes.
        draw = torch.Generator().manual_seed(0)
        classes = torch.randint(wide.shape[1], shape, generator=draw).to(wide.device)
        return nn.functional.cross_entropy(wide, classes)
    return torch.stack([_loss(value) for value in every_tensor_of(output)]).sum()
