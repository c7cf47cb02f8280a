"""One step of training, in full: pixels to floats, forward, loss, backward, update."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from ..errors import InputError, ModelFailed, NhwcError, is_out_of_memory
from ..formats import CHANNELS_LAST_OF, MEMORY_FORMATS
from .distributed import check_averaged, rank_and_world, speaks_of_peers

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Normalize:
    """Bytes to floats of mean 0 and deviation 1, on the device the images are on.

    >>> pixels = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    >>> Normalize(mean=(0.5,), std=(0.5,))(pixels).unique()
    tensor([-1.])

    The result is channels last, as the bytes are already, or contiguous; then the conversion to
    floats also reorders the data.
    """

    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    channels_last: bool = True

    def __call__(self, images: Tensor) -> Tensor:
        memory_format = torch.contiguous_format
        if self.channels_last:
            memory_format = MEMORY_FORMATS[CHANNELS_LAST_OF[images.ndim]]
        if len(self.mean) not in (1, images.shape[1]):
            raise InputError(
                f"images of {images.shape[1]} channels are normalised by {len(self.mean)} means. "
                "Give images of as many channels, or take them apart by a loop of your own."
            )
        pixels = images.to(torch.float32, memory_format=memory_format)
        mean, std = (
            torch.tensor(values, device=images.device).mul_(255).view(-1, *[1] * (images.ndim - 2))
            for values in (self.mean, self.std)
        )
        return pixels.sub_(mean).div_(std)


class TrainingStep:
    """A training step that a loop of your own can call.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> step = TrainingStep(net, torch.optim.SGD(net.parameters(), lr=0.1), dtype=torch.bfloat16)
    >>> loss, logits = step(torch.randn(4, 3, 16, 16), torch.tensor([0, 1, 2, 3]))
    >>> logits.shape, loss.requires_grad
    (torch.Size([4, 8]), False)

    `dtype` is the autocast dtype; with float16 the loss is scaled. `share` is the weight of this
    batch in an update that several batches share; `update` says that it is the last of them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        loss: Loss = F.cross_entropy,
        dtype: torch.dtype | None = None,
        clip: float | None = None,
        average: AveragedModel | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.loss, self.dtype, self.clip, self.average = loss, dtype, clip, average
        self.scaler = torch.amp.GradScaler(enabled=dtype is torch.float16)
        self._updated = False

    def __call__(
        self, images: Tensor, labels: Tensor, *, share: float = 1.0, update: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return the loss and the logits, detached."""
        # DistributedDataParallel needs to average gradients only for an update.
        waits = contextlib.nullcontext() if update else _no_sync(self.model)
        with explained(images), waits:
            with autocast(images.device, self.dtype):
                output = self.model(images)
                loss = sum_of_losses(self.loss, output, labels)
            self.scaler.scale(loss * share).backward()
        if update:
            self._update()
        return loss.detach(), logits_of(output).detach()

    def _update(self) -> None:
        if not self._updated and rank_and_world()[1] > 1:
            check_averaged(self.model)
        self._updated = True
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update_parameters(self.model)


def autocast(device: torch.device, dtype: torch.dtype | None) -> torch.autocast:
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


@contextlib.contextmanager
def explained(images: Tensor) -> Iterator[None]:
    """Turn what the model raises into ModelFailed, which names the shape of the batch."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise ModelFailed(
                f"out of memory with a batch of {tuple(images.shape)}. Use a smaller one; "
                "accumulation makes several count as one."
            ) from error
        if isinstance(error, NhwcError) or speaks_of_peers(error):
            raise
        first = str(error).strip().partition("\n")[0]
        raise ModelFailed(
            f"the model raised {type(error).__name__} on a batch of {tuple(images.shape)}: {first}"
        ) from error


def logits_of(output: object) -> Tensor:
    """The classifier's output: a tensor N, classes, or the first of a tuple."""
    first = output[0] if isinstance(output, tuple) and output else output
    if not isinstance(first, Tensor) or first.ndim != 2:
        what = (
            f"a tensor {tuple(first.shape)}" if isinstance(first, Tensor) else type(first).__name__
        )
        raise InputError(f"the model returned {what}; training needs logits of shape (N, classes).")
    return first


def sum_of_losses(loss: Loss, output: object, labels: Tensor) -> Tensor:
    """The loss of the logits, and 0.3 times that of each auxiliary head (GoogLeNet, Inception)."""
    total = loss(logits_of(output), labels)
    heads = output[1:] if isinstance(output, tuple) else ()
    for head in heads:
        if isinstance(head, Tensor):
            total = total + 0.3 * loss(head, labels)
    return total


def _no_sync(model: nn.Module) -> contextlib.AbstractContextManager[object]:
    no_sync = getattr(model, "no_sync", contextlib.nullcontext)
    return no_sync()  # type: ignore[no-any-return]
