"""Parallel convolutions whose results are added become one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nhwc
from nhwc.passes import FOLDING
from nhwc.passes.merge_branches import merge_branches

from ..fusing import assert_same, norms, random_, rewrite

IMAGE = torch.randn(2, 8, 7, 6, generator=torch.Generator().manual_seed(0))


class Branches(nn.Module):
    """Layers of one value, and what becomes of their results."""

    def __init__(self, join, *layers):
        super().__init__()
        self.join, self.layers = join, nn.ModuleList(layers)
        self.gamma = nn.Parameter(torch.linspace(-1, 2, 8).reshape(8, 1, 1))

    def forward(self, x):
        x = F.silu(x)
        return F.relu(self.join(x, *[layer(x) for layer in self.layers]))


def conv(size, padding=None, k=8, **settings):
    middle = tuple(side // 2 for side in size) if isinstance(size, tuple) else size // 2
    return nn.Conv2d(8, k, size, padding=middle if padding is None else padding, **settings)


def normed(size, **settings):
    return nn.Sequential(conv(size, bias=False, **settings), nn.BatchNorm2d(settings.get("k", 8)))


class RepMixer(Branches):
    def forward(self, x):
        mixer, small, own, norm = self.layers
        return x + self.gamma * (sum([own(x), mixer(x), small(x)]) - norm(x))


MERGED = {
    "RepVGG": Branches(lambda x, *y: y[0] + y[1] + y[2], normed(3), normed(1), nn.BatchNorm2d(8)),
    "RepVGG, in place": Branches(
        lambda x, a, b, c: a.add_(b).add_(c), normed(3), normed(1), nn.BatchNorm2d(8)
    ),
    "strided": Branches(lambda x, a, b: b + a, normed(3, stride=2), normed(1, stride=2)),
    "a sum of a list": Branches(lambda x, *y: sum(y), conv(1), conv(5), conv(3), conv((3, 5))),
    "groups": Branches(lambda x, a, b: a + b + x, conv(3, groups=2, k=8), conv(1, groups=2, k=8)),
    "depthwise and its input": Branches(lambda x, a: x + a, conv(7, groups=8)),
    "dilated": Branches(lambda x, a, b: a - 2 * b, conv(3, 2, dilation=2), conv(1)),
    "norm of the sum": nn.Sequential(
        Branches(lambda x, a, b: a + b, conv(3), conv(1)), nn.Conv2d(8, 4, 1)
    ),
    "RepMixer": RepMixer(None, *(normed(n, groups=8) for n in (3, 1)), *(nn.BatchNorm2d(8),) * 2),
}


@pytest.mark.parametrize("name", MERGED)
def test_branches_that_are_merged(name):
    net = random_(MERGED[name])
    merged, (*_, report) = rewrite(net, *FOLDING, merge_branches)
    assert [site.applied for site in report.sites] == [True], report.sites
    assert_same(merged, net, IMAGE)
    assert len([m for m in merged.modules() if isinstance(m, nn.Conv2d)]) == (
        2 if name == "norm of the sum" else 1
    )
    assert not norms(merged)


def overwritten(x, a, b):
    return a + x.mul_(2) + b


SHARED = conv(1)
KEPT = {
    "two shapes": (lambda x, a, b: a + b, conv((1, 5)), conv((5, 1))),
    "another place": (lambda x, a, b: a + b[:, :, 1:, 1:], conv(2, 1), conv(1, 1)),
    "a residual of another value": (lambda x, a, b: a + F.relu(b), conv(3), conv(1)),
    "also used alone": (lambda x, a, b: (a + b) * a, conv(3), conv(1)),
    "another padding": (lambda x, a, b: a + b, conv(3, padding_mode="reflect"), conv(1)),
    "padding in a word": (lambda x, a, b: a + b + x, conv(3, "same"), conv(1)),
    "padding in a word, of the smaller": (lambda x, a, b: b + a, conv(3), conv(1, "valid")),
    "called twice": (lambda x, a, b: a + b.relu(), SHARED, SHARED),
    "written between": (overwritten, conv(3), conv(1)),
    "one number for each row": (
        lambda x, a: x + torch.linspace(0, 1, 7).reshape(7, 1) * a,
        conv(3),
    ),
    "fewer outputs": (lambda x, a: x + a, conv(3, k=1)),
    "taps further apart": (
        lambda x, a, b: a + b,
        conv(3, 1, dilation=2, stride=7),
        conv(3, stride=7),
    ),
    "between the places of another": (
        lambda x, a, b: a + b,
        conv((4, 1), (1, 0), stride=(2, 1)),
        conv((3, 1), 0, stride=(2, 1)),
    ),
    "one strided pixel for all of its input": (lambda x, a: x + a, conv(3, stride=7)),
    "strided past": (lambda x, a, b: a + b[..., :4, :3], conv(3, stride=2), conv(1)),
}


@pytest.mark.parametrize("name", KEPT)
def test_branches_that_are_kept(name):
    join, *layers = KEPT[name]
    net = random_(Branches(join, *layers))
    kept, (report,) = rewrite(net, merge_branches)
    assert not any(site.applied for site in report.sites)
    assert all(site.reason for site in report.sites)
    assert_same(kept, net, IMAGE)


def test_branches_whose_sum_overflows_are_kept():
    net = Branches(lambda x, a, b: a + b, conv(3), conv(1)).half().eval()
    with torch.no_grad():
        for layer in net.layers:
            layer.weight.fill_(6e4)
    _, (report,) = rewrite(net, merge_branches)
    assert [site.reason for site in report.sites] == ["the merged weights do not fit torch.float16"]


def test_merged_branches_are_verified_and_follow_their_weights():
    net = random_(MERGED["RepVGG"])
    fast = nhwc.optimize(net, IMAGE)
    with torch.no_grad():
        torch.testing.assert_close(fast(IMAGE), net(IMAGE), rtol=1e-4, atol=1e-5)
        for parameter in fast.parameters():
            parameter.mul_(0.5)
        torch.testing.assert_close(fast(IMAGE), fast.portable(IMAGE), rtol=1e-4, atol=1e-5)
