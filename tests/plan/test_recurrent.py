"""An LSTM or a GRU between other layers of a program."""

import pytest
import torch
from torch import nn

from nhwc import kernels
from nhwc.graph.modules.mended import Recurrent

from ..optimizing import force
from .test_native import lowered

pytestmark = pytest.mark.skipif(
    not kernels.available(), reason=kernels.unavailable() or "the kernels are available"
)

KINDS = [nn.LSTM, nn.GRU]
SETTINGS = [
    {},
    {"batch_first": True, "bidirectional": True},
    {"num_layers": 3, "bias": False},
    {"num_layers": 2, "bidirectional": True, "dropout": 0.5},
]


def recurrent(kind, **settings):
    return Recurrent(kind(6, 21, **settings)).eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("shape", [(4, 3, 6), (1, 7, 6), (5, 6)])
@torch.no_grad()
def test_our_states_are_torchs(kind, settings, shape):
    net = nn.Sequential(recurrent(kind, **settings), nn.Tanh())
    x = torch.randn(shape)
    graph, program, chosen = lowered(net, x)
    torch.testing.assert_close(program(x), graph(x), rtol=1e-4, atol=1e-5)
    assert chosen[0] == "nhwc" or not graph(x).is_contiguous()


@torch.no_grad()
def test_steps_of_one_wide_sequence_are_steps_of_the_tape():
    net = nn.Sequential(Recurrent(nn.LSTM(8, 192)), nn.Linear(192, 4))
    x = torch.randn(6, 1, 8)
    graph, program, chosen = lowered(net, x)
    assert chosen == ["nhwc", "nhwc pointwise"]
    torch.testing.assert_close(program(x), graph(x), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_projected_states_are_torchs():
    net = nn.Sequential(Recurrent(nn.LSTM(6, 8, proj_size=4)), nn.Tanh())
    _, _, chosen = lowered(net.eval(), torch.randn(4, 3, 6))
    assert chosen == ["torch", "nhwc"]


class Reader(nn.Module):
    """As text is read in images: columns of a row of pixels are steps."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=(0, 1))
        self.rows = nn.GRU(6, 20, bidirectional=True, batch_first=True)
        self.last = nn.Linear(40, 5)

    def forward(self, x):
        y = self.conv(x).relu().mean(2).transpose(1, 2)
        y, ends = self.rows(y)
        return self.last(y), y[:, -1], torch.cat((ends[-2], ends[-1]), 1)


@torch.no_grad()
def test_weights_are_followed_and_the_whole_is_one_program():
    model, x = Reader().eval(), torch.randn(2, 3, 5, 9)
    fast = force(model, x)
    for _ in range(2):
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5, check_stride=True)
        for net in (model, fast):
            for name, parameter in net.named_parameters():
                if "weight_hh" in name or "bias_hh" in name:
                    parameter.mul_(-2.0)
    other = torch.randn(3, 3, 5, 4)
    torch.testing.assert_close(fast(other), model(other), rtol=1e-4, atol=1e-5)
