"""A layer of a class with a `forward` of its own, which no trace can follow, stays what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nhwc
from nhwc.passes import PASSES

from ..fusing import rewrite


def odd(kind: Any, *given: Any, **named: Any) -> nn.Module:
    """A layer of a subclass of `kind` that decides by values what to make of its result."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        found = kind.forward(self, *args, **kwargs)
        return found * 2 if found.sum() > -1e9 else found

    return type(f"Odd{kind.__name__}", (kind,), {"forward": forward})(*given, **named)


OF_IMAGES = {
    "conv": lambda: odd(nn.Conv2d, 8, 8, 3, padding=1),
    "circular conv": lambda: odd(nn.Conv2d, 8, 8, 3, padding=1, padding_mode="circular"),
    "transposed": lambda: odd(nn.ConvTranspose2d, 8, 8, 3),
    "batch norm": lambda: odd(nn.BatchNorm2d, 8),
    "group norm": lambda: odd(nn.GroupNorm, 2, 8),
    "instance norm": lambda: odd(nn.InstanceNorm2d, 8),
    "tracked": lambda: odd(nn.InstanceNorm2d, 8, affine=True, track_running_stats=True),
    "relu": lambda: odd(nn.ReLU),
    "silu": lambda: odd(nn.SiLU),
    "prelu": lambda: odd(nn.PReLU, 8),
    "dropout": lambda: odd(nn.Dropout),
    "dropout2d": lambda: odd(nn.Dropout2d),
    "identity": lambda: odd(nn.Identity),
    "softmax": lambda: odd(nn.Softmax, 1),
    "upsample": lambda: odd(nn.Upsample, scale_factor=2, mode="bilinear"),
    "max pool": lambda: odd(nn.MaxPool2d, 2),
    "average pool": lambda: odd(nn.AvgPool2d, 2),
    "adaptive": lambda: odd(nn.AdaptiveAvgPool2d, 1),
    "circular pad": lambda: odd(nn.CircularPad2d, 1),
    "zero pad": lambda: odd(nn.ZeroPad2d, 1),
    "reflection pad": lambda: odd(nn.ReflectionPad2d, 1),
    "shuffle": lambda: odd(nn.ChannelShuffle, 2),
}
OF_TOKENS = {
    "linear": lambda: odd(nn.Linear, 8, 8),
    "layer norm": lambda: odd(nn.LayerNorm, 8),
    "root mean square": lambda: odd(nn.RMSNorm, 8),
    "gelu": lambda: odd(nn.GELU),
    "softmax of tokens": lambda: odd(nn.Softmax, -1),
    "dropout of tokens": lambda: odd(nn.Dropout),
}


class Around(nn.Module):
    """What all passes like best, on either side of a layer."""

    def __init__(self, layer: nn.Module, tokens: bool) -> None:
        super().__init__()
        self.before, self.norm, self.layer = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), layer
        self.again, self.after, self.tokens = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), tokens
        for norm in (self.norm, self.again):
            nn.init.uniform_(norm.running_var, 0.5, 1.5)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.before(x)).relu()
        y = y.permute(0, 2, 3, 1) if self.tokens else y
        y = self.layer(y)
        y = y.permute(0, 3, 1, 2) if self.tokens else y
        return self.after(self.again(y).relu()) * 0.5


@pytest.mark.parametrize("name", [*OF_IMAGES, *OF_TOKENS])
@torch.no_grad()
def test_it_computes_what_its_own_code_says(name: str) -> None:
    make: Callable[[], nn.Module] = (OF_IMAGES | OF_TOKENS)[name]
    model, x = Around(make(), name in OF_TOKENS).eval(), torch.randn(2, 3, 10, 10)
    expected = model(x)
    torch.testing.assert_close(nhwc.fuse(model)(x), expected, rtol=1e-4, atol=1e-5)
    rewritten, _ = rewrite(model, *PASSES)
    torch.testing.assert_close(rewritten(x), expected, rtol=1e-4, atol=1e-5)
