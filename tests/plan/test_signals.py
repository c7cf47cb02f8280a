"""Signals in a plan, N, C, L: the kernels for images compute them, as images of one row each."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nhwc import kernels
from nhwc.graph.modules.layers import Fused
from nhwc.graph.modules.mended import GroupNorm, InstanceNorm

from .test_native import Net, images, lowered

pytestmark = pytest.mark.skipif(
    not kernels.available(), reason=kernels.unavailable() or "the kernels are available"
)

LAYERS = {
    "conv": nn.Conv1d(8, 6, 3, padding=1),
    "grouped": nn.Conv1d(8, 12, 5, 2, 2, 2, groups=4, bias=False),
    "depthwise": nn.Conv1d(8, 8, 3, padding=1, groups=8),
    "pointwise": Fused(nn.Conv1d(8, 8, 1), nn.SiLU()),
    "transposed": nn.ConvTranspose1d(8, 6, 4, 2, 1),
    "transposed in groups": Fused(nn.ConvTranspose1d(8, 8, 3, 2, groups=4), nn.ReLU()),
    "batch norm": nn.BatchNorm1d(8),
    "average": nn.AvgPool1d(3, 2, 1, count_include_pad=False),
    "largest": lambda x: F.max_pool1d(x, 3, 2, 1),
    "largest of all": lambda x: F.max_pool1d(x, x.size(2)),
    "mean": nn.AdaptiveAvgPool1d(1),
    "means": lambda x: F.adaptive_avg_pool1d(x, 3),
    "resized": nn.Upsample(scale_factor=2),
    "resized by less than a place": nn.Upsample(scale_factor=1.07),
    "resized linearly": lambda x: F.interpolate(x, scale_factor=1.7, mode="linear"),
    "PReLU": nn.PReLU(8, 0.3),
    "group norm": Fused(GroupNorm(nn.GroupNorm(2, 8)), nn.SiLU()),
    "instance norm": InstanceNorm(nn.InstanceNorm1d(8)),
}


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_our_layer_of_signals_is_torchs(name):
    (x,) = images((2, 8, 13))
    layer = LAYERS[name]
    function = nn.Sequential(layer).eval() if isinstance(layer, nn.Module) else layer
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    for given in (x, turned):
        graph, program, chosen = lowered(function, given)
        result, wanted = program(given), graph(given)
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)
        # What is returned in an order of its own is torch's.
        assert chosen[0].startswith("nhwc") or not wanted.is_contiguous()


class Gate(Net):
    """ECA: a convolution over the channels' means, which are a signal of one channel."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)
        self.mix = Fused(nn.Conv1d(1, 1, 3, padding=1, bias=False), nn.Sigmoid())

    def forward(self, x):
        x = self.first(x)
        gate = self.mix(x.mean((2, 3)).view(x.shape[0], 1, -1)).view(x.shape[0], -1, 1, 1)
        return self.last(x * gate.expand_as(x))


@torch.no_grad()
def test_a_signal_between_images_does_not_break_the_program():
    (x,) = images((2, 3, 9, 8))
    graph, program, chosen = lowered(Gate(), x)
    assert all(kernel.startswith("nhwc") for kernel in chosen), chosen
    assert [step.name for step in program.steps][1:-1] == ["first to last"]
    torch.testing.assert_close(program(x), graph(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("factor", [2, 1.7])
@torch.no_grad()
def test_infinity_stays_infinite_when_signals_are_resized(factor):
    (x,) = images((1, 8, 13))
    x[0, ::2, 5] = float("inf")
    x[0, 1::2, 8] = -float("inf")

    def resized(y):
        return F.interpolate(y, scale_factor=factor, mode="linear")

    graph, program, _ = lowered(resized, x)
    torch.testing.assert_close(program(x), graph(x), equal_nan=True)
