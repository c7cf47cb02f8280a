"""Activations that models spell with products become torch's own."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nhwc import kernels
from nhwc.passes import FOLDING
from nhwc.passes.join_activation import join_activation

from ..fusing import Block, assert_same, rewrite, script
from ..optimizing import force

IMAGE = torch.randn(2, 6, 5, 4, generator=torch.Generator().manual_seed(0)) * 4
ODD = torch.tensor([math.inf, -math.inf, math.nan, 1e30, -1e30, 0.0, -0.0, -3.0, 3.0, 1e-40])

SPELLED = {
    "swish": (lambda m, x: x * torch.sigmoid(x), nn.SiLU),
    "swish, a layer": (lambda m, x: m.gate(x) * x, nn.SiLU),
    "swish, in place": (lambda m, x: (y := x * 2).mul_(y.sigmoid()), nn.SiLU),
    "hard swish": (lambda m, x: x * F.relu6(x + 3) / 6, nn.Hardswish),
    "hard swish, of parts": (lambda m, x: x * (F.relu6(3.0 + x) * (1 / 6)), nn.Hardswish),
    "hard swish, clamped": (lambda m, x: (x + 3).clamp(0, 6) / 6.0 * x, nn.Hardswish),
    "hard swish, of a gate": (lambda m, x: x * F.hardsigmoid(x), nn.Hardswish),
    "hard sigmoid": (lambda m, x: F.hardtanh(x + 3, 0.0, 6.0) / 6, nn.Hardsigmoid),
}
OTHER = {
    "a gate of another": lambda m, x: x * torch.sigmoid(x + 1),
    "over seven": lambda m, x: x * F.relu6(x + 3) / 7,
    "two more": lambda m, x: x * F.relu6(x + 2) / 6,
    "within five": lambda m, x: x * (x + 3).clamp(0, 5) / 6,
    "gelu": lambda m, x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "written between": lambda m, x: (y := x * 1) * (torch.sigmoid(y) + y.view(-1).mul_(0).sum()),
}


def block(code):
    net = Block(code)
    net.gate = nn.Sigmoid()
    return net.eval()


@pytest.mark.parametrize("name", SPELLED)
@torch.no_grad()
def test_an_activation_is_joined(name):
    code, kind = SPELLED[name]
    net = block(code)
    joined, (*_, report) = rewrite(net, *FOLDING, join_activation)
    assert report.applied
    assert type(list(joined.modules())[-1]) is kind
    assert_same(joined, net, IMAGE)
    assert_same(script(joined), net, IMAGE)
    torch.testing.assert_close(joined(ODD), net(ODD), equal_nan=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert joined(IMAGE.bfloat16()).dtype is net(IMAGE.bfloat16()).dtype


@pytest.mark.parametrize("name", OTHER)
@torch.no_grad()
def test_what_is_no_activation_stays(name):
    net = block(OTHER[name])
    kept, (*_, report) = rewrite(net, *FOLDING, join_activation)
    assert not report.applied
    assert_same(kept, net, IMAGE)


@pytest.mark.skipif(not kernels.available(), reason=kernels.unavailable() or "it is")
@pytest.mark.parametrize("name", [name for name in SPELLED if "in place" not in name])
@torch.no_grad()
def test_the_layer_before_it_applies_it(name):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), block(SPELLED[name][0]), nn.Conv2d(8, 4, 1)).eval()
    x = torch.randn(2, 3, 9, 8)
    fast = force(net, x)
    [plan] = fast.report.plans
    assert len(plan.layers) == 2
    torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-4)
