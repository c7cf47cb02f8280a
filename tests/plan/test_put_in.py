"""Tensors that are filled part by part, as `x[key] = value` fills them, in a plan."""

import pytest
import torch
from torch import nn

import nhwc
from nhwc import kernels
from nhwc.plan.binding import bind
from nhwc.plan.scene import scene_of

from .test_native import chosen, images, names
from .test_tokens import count

pytestmark = pytest.mark.skipif(
    not kernels.available(), reason=kernels.unavailable() or "the kernels are available"
)


class Between(nn.Module):
    """`function` of images that a layer made, for another layer."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.relu = function, nn.ReLU()
        self.conv = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x, y):
        return self.conv(self.function(self.relu(x), self.relu(y)))


def shifted(blank):
    """Channels of the frame before, and of the frame behind, as TSM has them."""

    def function(x, y):
        n, c, h, w = x.shape
        clips = x.view(n // 4, 4, c, h, w)
        out = blank(clips)
        out[:, :-1, :4] = clips[:, 1:, :4]
        out[:, 1:, 4:8] = clips[:, :-1, 4:8]
        out[:, :, 8:] = clips[:, :, 8:]
        return out.view(n, c, h, w)

    return function


def shifted_and_joined(x, y):
    """The same, as MMAction has it."""
    n, c, h, w = x.shape
    clips = x.view(n // 4, 4, c, h, w)
    blank = torch.zeros_like(clips[:, :1, :4])
    left = torch.cat((clips[:, 1:, :4], blank), dim=1)
    right = torch.cat((blank, clips[:, :-1, 4:8]), dim=1)
    return torch.cat((left, right, clips[:, :, 8:]), dim=2).view(n, c, h, w)


def with_border(x, y):
    n, c, h, w = x.shape
    out = x.new_zeros((n, c, h + 2, w + 2))
    out[:, :, 1:-1, 1:-1] = x
    return out


def one_frame(x, y):
    n, c, h, w = x.shape
    clips = x.view(2, 4, c, h, w)
    clips[:, -2] = clips[:, 0]
    return clips.view(n, c, h, w)


def by_turns(x, y):
    out = torch.empty_like(x)
    out[..., ::2], out[..., 1::2] = x[..., 1::2], y[..., ::2]
    return out


def from_another(x, y):
    x = x * 1
    x[:, 3:8, 1:4] = y[:, 3:8, 1:4]
    x[:, -1] = y[:, 2]
    x[:, :, 1::3] = y[:, :, ::3]
    x[2:4] = 0.5
    return x


CASES = {
    "TSM": (shifted(torch.zeros_like), 1),
    "TSM, in zeros": (shifted(lambda y: torch.zeros(y.shape)), 1),
    "TSM, in one number": (shifted(lambda y: torch.full(y.shape, 0.0)), 1),
    "TSM, in a named number": (shifted(lambda y: torch.full(size=y.shape, fill_value=0.0)), 1),
    "TSM, joined": (shifted_and_joined, 1),
    "a border": (with_border, 1),
    "one frame": (one_frame, 1),
    "columns by turns": (by_turns, 3),
    "parts of another": (from_another, None),
}


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_parts_are_put_in(name):
    """What lies in one buffer, or nowhere, is moved on paper, and gathered once."""
    function, gathers = CASES[name]
    inputs = images((8, 16, 6, 6), (8, 16, 6, 6))
    graph = nhwc.fuse(Between(function).eval())
    scene = scene_of(graph, inputs)
    choice = chosen(scene)
    program = bind(scene, choice)
    assert all(kernel.startswith("nhwc") for kernel in names(choice)), names(choice)
    torch.testing.assert_close(program(*inputs), graph(*inputs), rtol=1e-4, atol=1e-5)
    assert gathers in (None, sum(count(step, "gather") for step in program.steps))


@torch.no_grad()
def test_two_that_want_an_image_have_it_put_in_order_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Conv2d(16, 8, 3), nn.Conv2d(16, 8, 3)

        def forward(self, x):
            y = x.transpose(1, 3)
            return self.one(y) + self.other(y)

    (x,) = images((2, 6, 6, 16))
    graph = nhwc.fuse(Twice().eval())
    scene = scene_of(graph, (x * 2,))
    program = bind(scene, chosen(scene))
    torch.testing.assert_close(program(x), graph(x), rtol=1e-4, atol=1e-5)
    assert sum(count(step, "gather") for step in program.steps) == 1


@torch.no_grad()
def test_a_part_that_is_returned_stays_an_image():
    graph = nhwc.fuse(Between(lambda x, y: x[:, :, 1:4]).eval())
    (part,) = (node for node in graph.graph.nodes if node.name.startswith("getitem"))
    graph.graph.output_node().args = (part,)
    graph.recompile()
    assert part not in scene_of(graph, images((8, 16, 6, 6), (8, 16, 6, 6))).record.tokens
