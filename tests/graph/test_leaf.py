"""Graphs with layers of ours are traced once more, by FX itself."""

import copy

import pytest
import torch
from torch import fx, nn

import nhwc
from nhwc.graph.modules.layers import LAYERS
from nhwc.graph.modules.leaf import Leaf
from nhwc.passes import PASSES


class Mended(nn.Module):
    """What the passes write otherwise: cats, shuffles, softmax, reductions, norms."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.circular = nn.Conv2d(16, 8, 3, padding=1, padding_mode="circular")

    def forward(self, x):
        y = self.norm(self.first(x))
        halves = y.chunk(2, 1)
        y = torch.cat((halves[1], halves[0], y), 1)
        y = self.circular(y).softmax(1)
        return y.mean((2, 3), keepdim=True) * y


@pytest.fixture
def mended():
    return nhwc.fuse(Mended().eval(), passes=PASSES)


def leaves(graph):
    return {name for name, module in graph.named_modules() if isinstance(module, Leaf)}


@pytest.mark.filterwarnings("ignore:The TorchScript type system")
def test_a_second_trace_keeps_them_whole(mended):
    x = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    again = fx.symbolic_trace(mended)
    assert leaves(mended)
    assert leaves(again) == leaves(mended)
    assert torch.equal(again(x), mended(x))
    assert again(x).stride() == mended(x).stride()
    torch.testing.assert_close(torch.jit.script(copy.deepcopy(mended))(x), mended(x))


def test_layers_that_look_at_their_inputs_are_leaves():
    for layer in LAYERS:
        code = layer.forward.__code__
        looks = {"dim", "stride", "size", "channel_is_densest", "is_in_another_order"}
        if looks & {*code.co_names}:
            assert issubclass(layer, Leaf), layer
