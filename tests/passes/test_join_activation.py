"""Activations that models spell out become one layer."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nhwc import kernels
from nhwc.operators.spelled import ErfGELU, QuickGELU, SquaredReLU, TanhGELU
from nhwc.passes import FOLDING
from nhwc.passes.join_activation import join_activation

from ..fusing import Block, assert_same, rewrite, script
from ..optimizing import force

IMAGE = torch.randn(2, 6, 5, 4, generator=torch.Generator().manual_seed(0)) * 4
ODD = torch.tensor([math.inf, -math.inf, math.nan, 1e30, -1e30, 0.0, -0.0, -3.0, 3.0, 1e-40])

ROOT = math.sqrt(2 / math.pi)

SPELLED = {
    "swish": (lambda m, x: x * torch.sigmoid(x), nn.SiLU),
    "swish, a layer": (lambda m, x: m.gate(x) * x, nn.SiLU),
    "swish, in place": (lambda m, x: (y := x * 2).mul_(y.sigmoid()), nn.SiLU),
    "hard swish": (lambda m, x: x * F.relu6(x + 3) / 6, nn.Hardswish),
    "hard swish, of parts": (lambda m, x: x * (F.relu6(3.0 + x) * (1 / 6)), nn.Hardswish),
    "hard swish, clamped": (lambda m, x: (x + 3).clamp(0, 6) / 6.0 * x, nn.Hardswish),
    "hard swish, of a gate": (lambda m, x: x * F.hardsigmoid(x), nn.Hardswish),
    "quick gelu": (lambda m, x: x * torch.sigmoid(1.702 * x), QuickGELU),
    "quick gelu, divided": (lambda m, x: m.gate(x / (1 / 1.702)) * x, QuickGELU),
    "mish": (lambda m, x: x * torch.tanh(F.softplus(x)), nn.Mish),
    "gelu": (lambda m, x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), ErfGELU),
    "gelu, halved": (lambda m, x: x * (torch.special.erf(x * 0.70710678) + 1) / 2, ErfGELU),
    "gelu by tanh": (
        lambda m, x: 0.5 * x * (1 + torch.tanh(ROOT * (x + 0.044715 * torch.pow(x, 3.0)))),
        TanhGELU,
    ),
    "gelu by tanh, of products": (
        lambda m, x: 0.5 * x * (1 + torch.tanh(x * ROOT * (1 + 0.044715 * x * x))),
        TanhGELU,
    ),
    "squared relu": (lambda m, x: F.relu(x) ** 2, SquaredReLU),
    "squared relu, by a method": (lambda m, x: x.relu().square(), SquaredReLU),
    "squared relu, a product": (lambda m, x: (y := x.relu()) * y, SquaredReLU),
    "leaky, as asked": (lambda m, x: torch.where(x > 0, x, 0.1 * x), nn.LeakyReLU),
    "leaky, the larger": (lambda m, x: torch.max(x, x * 0.1), nn.LeakyReLU),
    "leaky, the smaller first": (lambda m, x: torch.maximum(0.1 * x, x), nn.LeakyReLU),
    "hard sigmoid": (lambda m, x: F.hardtanh(x + 3, 0.0, 6.0) / 6, nn.Hardsigmoid),
}
OTHER = {
    "a gate of another": lambda m, x: x * torch.sigmoid(x + 1),
    "over seven": lambda m, x: x * F.relu6(x + 3) / 7,
    "two more": lambda m, x: x * F.relu6(x + 2) / 6,
    "within five": lambda m, x: x * (x + 3).clamp(0, 5) / 6,
    "another curve": lambda m, x: x * torch.sigmoid(1.7 * x),
    "another square": lambda m, x: x * torch.sigmoid(x * x),
    "a gelu of more": lambda m, x: x * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "a gelu of erf alone": lambda m, x: x * 0.5 * torch.erf(x / math.sqrt(2.0)),
    "a gelu of two": lambda m, x: 0.5 * (x + 1) * (1.0 + torch.erf(x / math.sqrt(2.0))),
    "a gelu raised by two": lambda m, x: x * 0.5 * (2.0 + torch.erf(x / math.sqrt(2.0))),
    "a softplus of half": lambda m, x: x * torch.tanh(F.softplus(x, 0.5)),
    "a relu that is read": lambda m, x: (y := F.relu(x)) ** 2 + y,
    "cubed": lambda m, x: F.relu(x) ** 3,
    "above one": lambda m, x: torch.where(x > 1, x, 0.1 * x),
    "steeper, the larger": lambda m, x: torch.max(x, x * 1.5),
    "of numbers, bounded": lambda m, x: x.clamp(min=0),
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
    assert_same(joined.double(), copy.deepcopy(net).double(), IMAGE.double())
    joined.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert joined(IMAGE.bfloat16()).dtype is net(IMAGE.bfloat16()).dtype


BOUNDED = {
    "nothing below zero": (lambda x: x.clamp(min=0), nn.ReLU),
    "nothing below zero, in place": (lambda x: x.clamp_(0), nn.ReLU),
    "nothing below zero, of a sum": (lambda x: torch.clamp_min(x + 1, 0.0), nn.ReLU),
    "up to six": (lambda x: torch.clip(x, 0, 6), nn.ReLU6),
    "at least": (lambda x: x.clamp(min=-0.5), nn.Hardtanh),
    "up to five": (lambda x: x.clamp(0, 5), None),
    "by another": (lambda x: x.clamp(min=x.mean()), None),
    "at most": (lambda x: x.clamp(max=1.0), None),
}


@pytest.mark.parametrize("name", BOUNDED)
@torch.no_grad()
def test_bounds_of_what_a_layer_returned_are_an_activation(name):
    code, kind = BOUNDED[name]
    net = Block(lambda m, x: code(m.layer(x)))
    net.layer = nn.Conv2d(6, 3, 1)
    joined, (*_, report) = rewrite(net.eval(), *FOLDING, join_activation)
    assert [site.what for site in report.sites] == ([kind.__name__] if kind else [])
    assert_same(joined, net, IMAGE)


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
