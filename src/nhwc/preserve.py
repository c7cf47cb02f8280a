"""Leave a model as it was found: what a run changes in it is put back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy


@contextlib.contextmanager
def preserved(model: nn.Module) -> Iterator[None]:
    """Put back train/eval flags, buffers, gradients, weight strides and the random state.

    >>> net = nn.BatchNorm2d(3)
    >>> with preserved(net):
    ...     _ = net(torch.randn(4, 3, 8, 8))
    >>> net.num_batches_tracked
    tensor(0)
    """
    modules = list(model.modules())
    training = [module.training for module in modules]
    buffers = [
        _remember(module, name)
        for module in modules
        for name, _ in module.named_buffers(recurse=False)
    ]
    parameters = [
        (p, p.grad, None if p.grad is None else p.grad.detach().clone(), p.requires_grad)
        for p in model.parameters()
    ]
    data = [(p, p.data) for p in model.parameters()]
    devices = sorted({p.device.index for p, *_ in parameters if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module, flag in zip(modules, training, strict=True):
            module.training = flag
        for restore in buffers:
            restore()
        with torch.no_grad():
            for parameter, grad, copy, requires_grad in parameters:
                parameter.grad = grad
                if grad is not None and copy is not None:
                    grad.copy_(copy)
                parameter.requires_grad_(requires_grad)
            for parameter, before in data:
                parameter.data = before


def _remember(module: nn.Module, name: str) -> Callable[[], None]:
    buffer = getattr(module, name)
    copy = None if buffer is None or _has_no_data(buffer) else buffer.detach().clone()

    def restore() -> None:
        if getattr(module, name) is not buffer:
            setattr(module, name, buffer)
        # Batch norm writes its statistics without raising their version: only the values tell. A
        # buffer nobody wrote to is not written to here either: it may be shared or mapped.
        if buffer is not None and copy is not None and not torch.equal(buffer, copy):
            with torch.no_grad():
                buffer.copy_(copy)

    return restore


def _has_no_data(tensor: Tensor) -> bool:
    return tensor.is_meta or is_lazy(tensor)
