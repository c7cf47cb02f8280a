"""A model's loss and accuracy on a set of images."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import InputError
from ..machine.environment import usable_device
from .distributed import agree_on_buffers_
from .loader import Loader
from .progress import Meter, Point
from .recipe import Recipe
from .step import Normalize, autocast, explained, logits_of


def evaluate(
    model: nn.Module,
    loader: Loader,
    recipe: Recipe = Recipe(),  # noqa: B008 - frozen
    *,
    device: torch.device | str = "cpu",
    epoch: int = 0,
) -> Point:
    """Run `model` over `loader` in evaluation mode, in the precision and format of `recipe`.

    In a process group each process takes its share, and every image counts once.
    """
    device = usable_device(device)
    agree_on_buffers_(model)
    meter = Meter(device, phase="val", epoch=epoch, batches=len(loader))
    normalize = Normalize(channels_last=recipe.channels_last)
    dtype = recipe.autocast_dtype(device)
    with modes_kept(model), torch.no_grad():
        model.eval()
        for images, labels, _ in loader.batches():
            pixels = normalize(images.to(device, non_blocking=True))
            labels = labels.to(device, non_blocking=True)
            with explained(pixels), autocast(device, dtype):
                logits = logits_of(model(pixels)).float()
                loss = F.cross_entropy(logits, labels)
            meter.add(loss, logits, labels)
    return meter.point(len(loader))


def check_width(width: int, classes: int) -> None:
    """Refuse more classes than outputs: their labels would fail an assertion on the device."""
    if width < classes:
        raise InputError(
            f"the model has {width} outputs and the data {classes} classes. Build it with "
            f"{classes} outputs."
        )


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Put every module back into training or evaluation mode, each as it was."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
