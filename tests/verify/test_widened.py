"""A model in float64: right as a whole copy would be, with few weights there at a time."""

import copy

import pytest
import torch
from torch import nn

from nhwc.verify.widened import run_in_float64, widened


def linear():
    return nn.Linear(300, 300)


class Block(nn.Module):
    """Reads the weights of its part itself, as attention does."""

    def __init__(self):
        super().__init__()
        self.part = linear()

    def forward(self, x):
        return nn.functional.linear(x, self.part.weight * 2, self.part.bias)


class Distant(nn.Module):
    """Reads the weights of a part's part."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(linear(), nn.ReLU())

    def forward(self, x):
        return self.block(x) + nn.functional.linear(x, self.block[0].weight)


class Recursive(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = linear()

    def forward(self, x, depth=3):
        return self.part(self(x, depth - 1)) if depth else x


class Forgiving(Distant):
    """Goes on when a part of it fails, or where it seems to."""

    def forward(self, x):
        try:
            x = self.block(x[:, 1:])
        except RuntimeError:
            x = self.block(x)
        try:
            return super().forward(x)
        except Exception:
            return x


def tied():
    net = nn.Sequential(linear(), nn.ReLU(), linear())
    net[2].weight = net[0].weight
    return net


def parametrized():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(linear()), linear())


NETS = (Block, Distant, Recursive, Forgiving, tied, parametrized, lambda: nn.LSTM(300, 300))


@pytest.mark.parametrize("make", NETS)
@torch.no_grad()
def test_it_answers_as_the_whole_copy_does(make):
    net, x = make(), torch.randn(4, 300)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    run = lambda wide: torch.cat([t.flatten() for t in _leaves(wide(x.double()))])
    found = run_in_float64(net, run)
    assert found.dtype is torch.float64
    assert torch.equal(found, run(widened(net)))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(p.dtype is torch.float32 for p in net.parameters())


@torch.no_grad()
def test_large_weights_are_there_while_their_module_runs_alone():
    net, x = nn.Sequential(*(linear() for _ in range(6))), torch.randn(1, 300).double()
    there = []

    def run(wide):
        weights = lambda: sum(type(layer.weight) is nn.Parameter for layer in wide)
        for layer in wide:
            layer.register_forward_hook(lambda *_: there.append(weights()))
        wide(x)
        there.append(weights())
        return x

    run_in_float64(net, run)
    # A hook registered later runs when those weights have gone already.
    assert there == [0] * 7


def test_what_fails_in_float64_fails():
    class Narrow(nn.Linear):
        def forward(self, x):
            raise TypeError("float32 alone")

    with pytest.raises(TypeError, match="float32 alone"):
        run_in_float64(Narrow(300, 300), lambda wide: wide(torch.ones(1, 300)))


@torch.no_grad()
def test_a_model_in_float64_is_not_written_to():
    class Writes(nn.Linear):
        def forward(self, x):
            self.weight.mul_(2)
            return super().forward(x)

    net = Writes(300, 300).double()
    before = net.weight.clone()
    run_in_float64(net, lambda wide: wide(torch.ones(1, 300).double()))
    assert torch.equal(net.weight, before)


def _leaves(value):
    return torch.utils._pytree.tree_leaves(value)


CONVOLUTIONS = {
    "volume": (nn.Conv3d(4, 6, 3, padding=1), (2, 4, 9, 7, 8)),
    "strides": (nn.Conv3d(4, 6, (3, 1, 2), (2, 1, 2), (1, 0, 1)), (1, 4, 9, 5, 6)),
    "dilation and groups": (nn.Conv3d(4, 8, 3, dilation=(3, 2, 1), groups=2), (1, 4, 11, 6, 5)),
    "image": (nn.Conv2d(4, 6, 3, 2, padding=(2, 1), bias=False), (2, 4, 12, 7)),
    "around": (nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="circular"), (1, 4, 9, 8)),
    "as large as the input": (nn.Conv2d(4, 6, 3, padding="same"), (1, 4, 9, 8)),
    "a number for all sides": (nn.Conv2d(4, 6, 3, (2,), (1,), (1,)), (1, 4, 12, 8)),
    "one image alone": (nn.Conv2d(4, 6, 3), (4, 9, 8)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_in_slices(name, monkeypatch):
    """A few rows or frames at a time give what all of them give."""
    monkeypatch.setattr("nhwc.verify.widened._WINDOWS", 1 << 15)
    convolution, shape = CONVOLUTIONS[name]
    x = torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        expected = copy.deepcopy(convolution).double()(x)
        torch.testing.assert_close(widened(convolution)(x), expected, rtol=0, atol=1e-12)


def test_windows_of_a_volume_are_not_written_out_at_once(monkeypatch):
    """What all pixels see would be 27 times the input."""
    sizes = []
    plain = torch.conv3d

    def seen(x, *more):
        sizes.append(len(x[0, 0]))
        return plain(x, *more)

    monkeypatch.setattr(torch, "conv3d", seen)
    monkeypatch.setattr("nhwc.verify.widened._WINDOWS", 1 << 20)
    with torch.no_grad():
        widened(nn.Conv3d(8, 8, 3, padding=1))(torch.randn(1, 8, 20, 16, 16).double())
    assert len(sizes) > 5
    assert max(sizes) < 6


def test_what_is_set_on_a_convolution_alone_runs_in_float64():
    conv, x = nn.Conv2d(3, 8, 3), torch.rand(1, 3, 8, 8)
    conv._conv_forward = lambda x, weight, bias: nn.functional.conv2d(x, weight, bias) + 1
    torch.testing.assert_close(widened(conv)(x.double()).float(), conv(x))
