"""What slows mixed precision on this processor, found by asking torch and the machine."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import skip_init

from ..formats import CHANNELS_LAST_OF, convert_, format_of, to_format
from ..machine.bfloat16 import emulates_bfloat16
from .recipe import Recipe

KINDS = (nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def remarks(model: nn.Module, recipe: Recipe, device: torch.device) -> list[str]:
    """Warn of what slows a run of `recipe` on this machine, one line for each.

    >>> remarks(nn.Sequential(nn.Conv2d(3, 8, 3)), Recipe(amp=False), torch.device("cpu"))
    []
    """
    dtype = recipe.autocast_dtype(device)
    if dtype is None or device.type != "cpu":
        return []
    name = str(dtype).removeprefix("torch.")
    lines = []
    if dtype is torch.bfloat16 and emulates_bfloat16():
        lines.append(
            f"{name} is emulated on this processor; float32, without mixed precision, may be faster"
        )
    lost = losing_convolutions(model, dtype) if recipe.channels_last else []
    if lost:
        lines.append(
            f"channels last is lost on this processor by {', '.join(lost)} in {name}: torch "
            "answers contiguous, and the next layer pays to convert"
        )
    return lines


def losing_convolutions(model: nn.Module, dtype: torch.dtype) -> list[str]:
    """Name the kinds of convolution in `model` that lose channels last on images of `dtype`.

    >>> losing_convolutions(nn.Sequential(nn.Conv2d(3, 8, 3)), torch.float32)
    []
    """
    layers = [module for module in model.modules() if isinstance(module, KINDS)]
    return [
        ("grouped " if grouped else "") + kind.__name__
        for kind in KINDS
        for grouped in (False, True)
        if any(isinstance(one, kind) and (one.groups > 1) is grouped for one in layers)
        and not _keeps(skip_init(kind, 16, 16, 3, groups=4 if grouped else 1), dtype)
    ]


@torch.no_grad()
def _keeps(layer: nn.Module, dtype: torch.dtype) -> bool:
    """Whether a layer keeps channels last, tried on two images: one has ambiguous strides."""
    dims = 5 if isinstance(layer, nn.Conv3d | nn.ConvTranspose3d) else 4
    image = to_format(torch.zeros(2, 16, *[9] * (dims - 2), dtype=dtype), CHANNELS_LAST_OF[dims])
    try:
        answer = convert_(layer.to(dtype))(image)
    except RuntimeError:
        # The layer cannot compute this dtype at all, which the run itself will report.
        return True
    return format_of(answer) is CHANNELS_LAST_OF[dims]
