"""Activations that models spell and torch has no module for, or one that answers otherwise.

Torch's own GELU makes NaN of infinity here; what is spelled with `erf` or `tanh` does not. Under
autocast on a GPU, what is spelled with a power is computed in float32, and products are not.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class QuickGELU(nn.Module):
    """`x * sigmoid(1.702 * x)`: CLIP's.

    >>> QuickGELU()(torch.tensor([-100.0, 0.0, 100.0])).abs()
    tensor([  0.,   0., 100.])
    """

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class ErfGELU(nn.Module):
    """`0.5 * x * (1 + erf(x / sqrt(2)))`.

    >>> ErfGELU()(torch.tensor([-100.0, 0.0, math.inf])).abs()
    tensor([0., 0., inf])
    """

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.erf(x * math.sqrt(0.5)))


class TanhGELU(nn.Module):
    """`0.5 * x * (1 + tanh(z))` with z = sqrt(2 / pi) * (x + 0.044715 x**3).

    >>> TanhGELU()(torch.tensor([-100.0, 0.0, math.inf])).abs()
    tensor([0., 0., inf])
    """

    def __init__(self, power: bool = False) -> None:
        super().__init__()
        self.power = power

    def forward(self, x: Tensor) -> Tensor:
        cube = x.pow(3) if self.power else x * x * x
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * cube)))

    def extra_repr(self) -> str:
        return f"power={self.power}"


class SquaredReLU(nn.Module):
    """`relu(x) ** 2`, of which StarReLU is a multiple and a sum.

    >>> SquaredReLU()(torch.tensor([-3.0, 3.0]))
    tensor([0., 9.])
    """

    def __init__(self, power: bool = True) -> None:
        super().__init__()
        self.power = power

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(x)
        return y.pow(2) if self.power else y * y

    def extra_repr(self) -> str:
        return f"power={self.power}"


SPELLED: tuple[type[nn.Module], ...] = (QuickGELU, ErfGELU, TanhGELU, SquaredReLU)
