"""Truth as numbers: what is written in between, what is returned, what is constant."""

import pytest
import torch
from torch import nn

import nhwc
from nhwc import kernels
from nhwc.plan.binding import bind
from nhwc.plan.scene import scene_of

from .test_native import Net, chosen, images, names

pytestmark = pytest.mark.skipif(
    not kernels.available(), reason=kernels.unavailable() or "the kernels are available"
)


class Choosing(Net):
    """A convolution, and what a function chooses of its result."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.conv, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.register_buffer("places", torch.rand(7, 6) > 0.5)
        self.register_buffer("least", torch.tensor(0.1))

    def forward(self, x):
        return self.last(self.function(self, self.conv(x)))


def planned(model, *inputs):
    """The model as a graph, its plan, and the kernels in it."""
    graph = nhwc.fuse(model.eval())
    scene = scene_of(graph, inputs)
    choice = chosen(scene)
    return graph, bind(scene, choice), names(choice)


def put(x, mask):
    x = x.clone()
    x[mask] = 0.25
    return x


def pixels_filled(x, number):
    return x.masked_fill(x > 0, number)


def kept(net, x):
    truth = x > 0
    x.add_(1)
    return x * truth


def written(net, x):
    truth = x > 0
    truth.logical_not_()
    return x * truth


def filled(net, x):
    mask = torch.ones_like(x, dtype=torch.bool)
    mask[:, :4, 2:] = x[:, 4:, :-2] > 0
    return mask


OURS = {
    "a constant": lambda net, x: x.masked_fill(~net.places, 0.0),
    "a threshold that is held": lambda net, x: torch.where(x > net.least, x, net.least),
    "what is put there": lambda net, x: put(x, x > 0.5),
    "truth of what is written to later": kept,
    "truth that is put into other": lambda net, x: x.masked_fill(~filled(net, x), 0.0),
    "the same truth twice": lambda net, x: (
        torch.where(x > 0, x, -x) + torch.where(x.mean(1, True) > 0, x, x * 2)
    ),
    "the limits of a type": lambda net, x: x.masked_fill(x > 1, torch.finfo(x.dtype).min / 4).clamp(
        torch.finfo(x.dtype).eps
    ),
    "scores": lambda net, x: x.masked_fill(x > x.mean(3, True) + 0.5, -torch.inf).softmax(-1),
}


@pytest.mark.parametrize("name", OURS)
@torch.no_grad()
def test_our_kernels_choose(name):
    (x,) = images((2, 8, 7, 6))
    graph, program, kernels = planned(Choosing(OURS[name]), x)
    assert all(kernel.startswith("nhwc") for kernel in kernels), kernels
    for given in (x, x.to(memory_format=torch.channels_last)):
        torch.testing.assert_close(program(given), graph(given), rtol=1e-4, atol=1e-5)


def told(net, x):
    mask = torch.zeros_like(x, dtype=torch.bool)
    mask[:, :4] = x[:, 4:].relu()
    return x.masked_fill(mask, 0.0) * mask


@torch.no_grad()
def test_numbers_that_are_put_into_truth_are_true_but_for_zero():
    (x,) = images((2, 8, 7, 6))
    graph, program, _ = planned(Choosing(told), x)
    torch.testing.assert_close(program(x), graph(x), rtol=1e-4, atol=1e-5)


LYING = {
    "masked_fill": lambda net, x: x.masked_fill(net.choice, 1.0),
    "seen in order": lambda net, x: x.masked_fill(net.choice, 1.0).view(2, -1).relu(),
    "filled with one number": lambda net, x: x.masked_fill(net.choice, net.least),
    "filled with the largest": lambda net, x: x.masked_fill(x > net.least, x.max()),
    "filled where channels are last": lambda net, x: pixels_filled(
        x.permute(0, 2, 3, 1), net.least
    ),
    "filled in place": lambda net, x: (x + 0).masked_fill_(net.choice, 1.0),
    "filled in place with one number": lambda net, x: (x + 0).masked_fill_(net.choice, net.least),
    "filled in place where channels are last": lambda net, x: (
        x.permute(0, 2, 3, 1) + 0
    ).masked_fill_(net.choice.permute(0, 2, 3, 1), 1.0),
    "what is put there": lambda net, x: put(x, net.choice),
    "where": lambda net, x: torch.where(net.choice, x, 1.0),
}


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", LYING)
@torch.no_grad()
def test_what_is_chosen_lies_as_torch_lays_it(name, last):
    (x,) = images((2, 8, 7, 6))
    x = x.to(memory_format=torch.channels_last) if last else x.contiguous()
    net = Choosing(LYING[name])
    choice = torch.rand(2, 8, 7, 6) > 0.5
    net.register_buffer("choice", choice.to(memory_format=torch.channels_last))
    net.last = nn.Identity()
    graph, program, _ = planned(net, x)
    torch.testing.assert_close(program(x), graph(x), rtol=1e-4, atol=1e-5, check_stride=True)


TORCHS = {
    "of nothing, any": lambda net, x: x * (x[:, :0] > 0).any(1, True),
    "of nothing, all": lambda net, x: x.masked_fill((x[:, :0] > 0).all(1, True), 2.0),
    "seen as bytes": lambda net, x: x * (x > 0).view(torch.bool),
    "seen as bytes, by name": lambda net, x: x * (x > 0).view(dtype=torch.bool),
}


@pytest.mark.parametrize("name", TORCHS)
@torch.no_grad()
def test_truth_that_numbers_cannot_stand_for(name):
    (x,) = images((2, 8, 7, 6))
    graph, program, _ = planned(Choosing(TORCHS[name]), x)
    torch.testing.assert_close(program(x), graph(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_truth_that_is_written_to_stays():
    (x,) = images((2, 8, 7, 6))
    graph, program, kernels = planned(Choosing(written), x)
    assert "torch" in kernels
    torch.testing.assert_close(program(x), graph(x), rtol=1e-4, atol=1e-5)


class Given(Choosing):
    """Is told where to choose."""

    def forward(self, truth, x):
        return self.last(self.conv(x).masked_fill(truth, -1.0) * truth)


@torch.no_grad()
def test_truth_that_is_given_becomes_numbers():
    (x,) = images((2, 8, 7, 6))
    truth = torch.rand(2, 1, 7, 6) > 0.5
    graph, program, kernels = planned(Given(None), truth, x)
    assert kernels.count("torch") == 1, kernels
    for given in (truth, ~truth):
        torch.testing.assert_close(program(given, x), graph(given, x), rtol=1e-4, atol=1e-5)


class Showing(Choosing):
    """Returns what it chose by, too."""

    def forward(self, x):
        x = self.conv(x)
        truth = x > 0
        return self.last(x * truth), truth


@torch.no_grad()
def test_truth_that_is_returned_is_truth():
    (x,) = images((2, 8, 7, 6))
    graph, program, _ = planned(Showing(None), x)
    made, truth = program(x)
    wanted, expected = graph(x)
    assert truth.dtype is torch.bool
    assert torch.equal(truth, expected)
    torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-5)
