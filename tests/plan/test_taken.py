"""Numbers of a tensor that constants say the places of, as scans and permutations have them."""

import pytest
import torch
from torch import nn

from nhwc import kernels

from ..optimizing import force
from .test_native import images

pytestmark = pytest.mark.skipif(
    not kernels.available(), reason=kernels.unavailable() or "the kernels are available"
)


class Taking(nn.Module):
    """`function` of this module and of an image, between two layers."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.LazyConv2d(8, 1)
        self.register_buffer("order", torch.randperm(16))
        self.register_buffer("lines", torch.randperm(8))
        self.register_buffer("pixels", torch.randperm(64))
        self.register_buffer("some", torch.rand(16) > 0.5)

    def forward(self, x):
        return self.last(self.function(self, self.first(x).relu()))


class TakingGiven(Taking):
    def forward(self, x, places):
        return self.last(self.function(self, self.first(x).relu(), places))


class Returning(Taking):
    def forward(self, x):
        return self.last(self.first(x)[:, self.order]), self.order * 1


def scanned(net, y):
    """Pixels in another order, and back."""
    tokens = y.flatten(2).transpose(1, 2).index_select(1, net.pixels)
    tokens = tokens.softmax(-1)[:, net.pixels.argsort()]
    return tokens.transpose(1, 2).unflatten(2, (8, 8))


WAYS = {
    "channels": lambda net, y: y[:, net.order],
    "a few, named": lambda net, y: torch.index_select(y, dim=1, index=net.order[:5]),
    "from behind": lambda net, y: y[..., -1 - net.lines],
    "lines and columns": lambda net, y: y[:, :, net.lines[:, None], net.lines],
    "a mask": lambda net, y: y[:, net.some],
    "steps": lambda net, y: y[:, :, torch.arange(0, 8, 2)],
    "images": lambda net, y: y[torch.tensor([1, 0, 0])],
    "gather": lambda net, y: y.gather(2, net.lines.view(1, 1, -1, 1).repeat(2, 16, 1, 8)),
    "along": lambda net, y: torch.take_along_dim(y, net.order.view(1, -1, 1, 1), 1),
    "joined": lambda net, y: torch.cat((y[:, net.order[:3]], y[:, net.order[9:]]), 1),
    "order as numbers": lambda net, y: y[:, net.order] * net.order.view(-1, 1, 1),
    "numbers of all": lambda net, y: y.take(net.pixels).view(1, 1, 8, 8).expand(2, 16, 8, 8),
    "scanned": scanned,
}
MOVES = {
    "turned": lambda net, y: torch.rot90(y, 1, (2, 3)) + y.rot90(2, (-2, -1)),
    "mirrored": lambda net, y: torch.flipud(y) + y.flip(-1) + y[0].fliplr(),
    "spread": lambda net, y: y[:, :1].broadcast_to(y.shape),
    "cast to what it is": lambda net, y: (y * 2).to(y.dtype).type_as(y).float() + y,
    "raveled": lambda net, y: torch.ravel(y).view(y.shape),
    "a diagonal": lambda net, y: y.diagonal(1, 2, 3).unsqueeze(-1).expand(-1, -1, -1, 8),
    "in parts": lambda net, y: torch.cat((y.hsplit(2)[1], y.hsplit(2)[0].vsplit(1)[0]), 1),
}


@pytest.mark.parametrize("way", WAYS)
@torch.no_grad()
def test_places_that_are_known_are_taken_on_paper(way):
    net, (x,) = Taking(WAYS[way]).eval(), images((2, 3, 8, 8))
    net(x)
    fast = force(net, x)
    [plan] = fast.report.plans
    assert not plan.fallbacks
    before = fast(x)
    torch.testing.assert_close(before, net(x), rtol=1e-4, atol=1e-5)
    places = [one for one in fast.portable.buffers() if one.dtype is torch.int64][:1]
    for one in places:
        one.copy_(one.flatten().flip(0).view_as(one))
    changed = fast(x)
    torch.testing.assert_close(changed, fast.portable(x), rtol=1e-4, atol=1e-5)
    assert not places or not torch.equal(changed, before)


@pytest.mark.parametrize("way", MOVES)
@torch.no_grad()
def test_moves_are_made_on_paper(way):
    net, (x,) = Taking(MOVES[way]).eval(), images((2, 3, 8, 8))
    net(x)
    fast = force(net, x)
    assert not fast.report.plans[0].fallbacks
    torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "way",
    [
        lambda net, y, places: y[:, places],
        lambda net, y, places: y[:, net.order[places]],
        lambda net, y, places: y[:, :, (y.mean((0, 1, 3)) + net.lines).argsort()],
    ],
)
@torch.no_grad()
def test_places_that_follow_from_the_input_are_not(way):
    net, (x,) = TakingGiven(way).eval(), images((2, 3, 8, 8))
    places = torch.arange(16)
    net(x, places)
    fast = force(net, x, places)
    for given in (places, places.flip(0)):
        torch.testing.assert_close(fast(x.flip(2), given), net(x.flip(2), given))


@torch.no_grad()
def test_places_that_are_returned_are_the_users():
    net, (x,) = Returning(None).eval(), images((2, 3, 8, 8))
    net(x)
    fast = force(net, x)
    fast(x)[1].zero_()
    for ours, own in zip(fast(x), net(x), strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-4, atol=1e-5)
