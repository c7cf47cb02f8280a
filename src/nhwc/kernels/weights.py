"""Weights in panels, as the micro-kernel reads them, with the bias behind them."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from .isa import Isa
from .microkernel import panel_columns
from .steps import View


def pack_panels(matrix: Tensor, isa: Isa) -> Tensor:
    """Lay out a matrix [depth, columns] panel after panel: flat, columns filled up with zeros.

    >>> from .isa import AVX2
    >>> pack_panels(torch.ones(3, 40), AVX2).shape
    torch.Size([120])
    """
    depth, columns = matrix.shape
    whole = columns // panel_columns(isa) * panel_columns(isa)
    full = matrix[:, :whole].reshape(depth, -1, panel_columns(isa)).transpose(0, 1)
    if whole == columns:
        return full.flatten()
    rest = F.pad(matrix[:, whole:], (0, -columns % isa.width))
    return torch.cat((full.flatten(), rest.flatten()))


def pack_bias(bias: Tensor | None, columns: int, groups: int, isa: Isa) -> Tensor:
    """The bias of each group, zeros for None, filled up to whole vectors."""
    values = torch.zeros(columns * groups) if bias is None else bias.detach().float()
    return F.pad(values.reshape(groups, columns), (0, -columns % isa.width)).flatten()


def pack_convolution(weight: Tensor, bias: Tensor | None, groups: int, isa: Isa) -> Tensor:
    """One flat tensor: the panels of every group, then the bias. `weight` is K, C/groups, R, S."""
    k = len(weight) // groups
    taps_first = weight.detach().float().permute(0, 2, 3, 1).reshape(groups, k, -1)
    panels = [pack_panels(group.t(), isa) for group in taps_first]
    return torch.cat((*panels, pack_bias(bias, k, groups, isa)))


def after(packed: Tensor | View, floats: int) -> Tensor | View:
    """What lies `floats` behind the beginning of packed weights, which may be yet to be bound."""
    if isinstance(packed, View):
        return replace(packed, offset=packed.offset + floats)
    return packed[floats:]
