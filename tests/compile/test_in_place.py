"""Activations that write into what they are given, however the code says so."""

import torch
from torch import nn
from torch.nn import functional as F


class Written(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        return F.hardswish(self.conv(x), True).mean((2, 3))


@torch.no_grad()
def test_an_activation_that_is_told_its_place_by_position_is_kept():
    model, x = Written().eval(), torch.randn(2, 3, 12, 12)
    fast = torch.compile(model, backend="nhwc")
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
