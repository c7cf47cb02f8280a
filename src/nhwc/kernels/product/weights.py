"""Weights in panels, as the micro-kernel reads them, with the bias behind them."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..language.isa import Isa
from ..language.loops import padded
from ..tape.pages import room, shared
from ..tape.steps import View


def fill_panels(packed: Tensor, matrix: Tensor, isa: Isa) -> None:
    """Lay out a matrix [depth, columns] panel after panel: flat, columns filled up with zeros.

    >>> from nhwc.kernels.language.isa import AVX2
    >>> fill_panels(torch.empty(120), torch.ones(3, 40), AVX2)
    """
    depth, columns = matrix.shape
    wide, padding = isa.panel_columns, -columns % isa.width
    panels, rest = columns // wide, columns % wide
    full = packed[: depth * panels * wide].view(panels, depth, wide)
    full.copy_(matrix[:, : panels * wide].unflatten(1, (panels, wide)).transpose(0, 1))
    last = packed[depth * panels * wide :].view(depth, rest + padding)
    last.copy_(F.pad(matrix[:, panels * wide :], (0, padding)))


def pack_bias(bias: Tensor | None, columns: int, groups: int, isa: Isa) -> Tensor:
    """The bias of each group, zeros for None, filled up to whole vectors."""
    values = torch.zeros(columns * groups) if bias is None else bias.detach().float()
    return F.pad(values.reshape(groups, columns), (0, -columns % isa.width)).flatten()


def pack_convolution(weight: Tensor, bias: Tensor | None, groups: int, isa: Isa) -> Tensor:
    """One flat tensor: the panels of every group, then the bias. `weight` is K, C/groups, ..."""
    k = len(weight) // groups
    taps_first = weight.detach().float().movedim(1, -1).reshape(groups, k, -1)
    ending = pack_bias(bias, k, groups, isa)
    packed = room((taps_first.shape[2] + 1) * len(ending))
    panels = packed[: -len(ending)].view(groups, -1)
    for group, place in zip(taps_first, panels, strict=True):
        fill_panels(place, group.t(), isa)
    packed[-len(ending) :] = ending
    return shared(packed)


def pad_channels(values: Tensor | None, channels: int) -> Tensor:
    """Rows of a value per channel, filled up with zeros to whole vectors; of -0.0 for None.

    Whatever -0.0 is added to stays what it is, where 0.0 would make 0.0 of -0.0.
    """
    if values is None:
        return torch.full((padded(channels),), -0.0)
    rows = values.detach().float()
    filled = room(math.prod(rows.shape[:-1]) * padded(channels)).view(*rows.shape[:-1], -1)
    filled[..., :channels] = rows
    filled[..., channels:] = 0.0
    return shared(filled)


def pack_depthwise(weight: Tensor, isa: Isa) -> Tensor:
    """Depthwise filters as [panel][tap][channel]: what is read together lies together."""
    taps, wide = weight.detach().flatten(1).t(), isa.panel_columns
    panels = F.pad(taps, (0, -len(weight) % wide)).unflatten(1, (-1, wide))
    return pad_channels(panels.transpose(0, 1), wide)


def depthwise_floats(taps: int, isa: Isa) -> int:
    """The room that one panel of `pack_depthwise` takes."""
    return taps * padded(isa.panel_columns)


def after(packed: Tensor | View, floats: int) -> Tensor | View:
    """The packed weights from `floats` on; they may be a view that is not bound yet."""
    if isinstance(packed, View):
        return replace(packed, offset=packed.offset + floats)
    return packed[floats:]
