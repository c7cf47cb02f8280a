"""A factor and a shift behind an activation go into the layer that reads it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nhwc import kernels
from nhwc.passes import FOLDING
from nhwc.passes.fold_scale_before import fold_scale_before

from ..fusing import Block, assert_same, rewrite
from ..optimizing import force

IMAGE = torch.randn(2, 6, 9, 8, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(2, 7, 6, generator=torch.Generator().manual_seed(0))


def star(behind, *, factor=0.9, shift=0.1, before=None, act=F.gelu, code=None, dtype=torch.float32):
    """`behind(factor * act(before(x)) + shift)`."""
    ending = code or (lambda m, y: m.behind(m.factor * y + m.shift))
    net = Block(lambda m, x: ending(m, act(m.before(x))))
    net.before = before or nn.Conv2d(6, 8, 1)
    net.behind = behind
    net.factor = nn.Parameter(torch.tensor([factor], dtype=dtype))
    net.shift = nn.Parameter(torch.tensor([shift], dtype=dtype))
    return net.eval()


FOLDED = {
    "1x1": star(nn.Conv2d(8, 4, 1)),
    "no bias": star(nn.Conv2d(8, 4, 1, bias=False)),
    "larger, without padding": star(nn.Conv2d(8, 4, 3, stride=2)),
    "of groups": star(nn.Conv2d(8, 4, 3, groups=2)),
    "pads with its ends": star(nn.Conv2d(8, 4, 3, padding=1, padding_mode="replicate")),
    "negative": star(nn.Conv2d(8, 4, 1), factor=-0.7),
    "by zero": star(nn.Conv2d(8, 4, 1), factor=0.0),
    "a factor alone, padded": star(
        nn.Conv2d(8, 4, 3, padding=1), code=lambda m, y: m.behind(y * m.factor)
    ),
    "a shift alone": star(nn.Conv2d(8, 4, 1), code=lambda m, y: m.behind(m.shift + y)),
    "rows": star(nn.Linear(8, 4), before=nn.Linear(6, 8)),
}
STAYS = {
    "a padded shift alone": (
        star(nn.Conv2d(8, 4, 3, padding=1), code=lambda m, y: m.behind(m.shift + y)),
        "pads with zeros",
    ),
    "a padded shift behind nothing": (
        star(nn.Conv2d(8, 4, 3, padding=1), factor=0.0),
        "pads with zeros",
    ),
    "infinite": (star(nn.Conv2d(8, 4, 1), factor=torch.inf), "the factor is inf"),
    "of another type": (
        star(nn.Conv2d(8, 4, 1).double(), dtype=torch.float64),
        "not torch.float64",
    ),
    "read elsewhere, too": (
        star(nn.Conv2d(8, 4, 1), code=lambda m, y: m.behind(m.factor * y) + y.mean()),
        "read elsewhere",
    ),
    "transposed": (star(nn.ConvTranspose2d(8, 4, 3)), None),
    "read twice": (
        star(nn.Conv2d(8, 4, 1), code=lambda m, y: m.behind(z := m.factor * y) + z.mean()),
        None,
    ),
    "no activation": (star(nn.Conv2d(8, 4, 1), act=torch.sin), None),
    "by a number for each channel": (
        star(nn.Conv2d(8, 4, 1), code=lambda m, y: m.behind(y * m.before.bias.view(-1, 1, 1))),
        None,
    ),
}


@pytest.mark.parametrize("name", FOLDED)
def test_numbers_are_folded(name):
    net, x = FOLDED[name], ROWS if name == "rows" else IMAGE
    folded, (*_, report) = rewrite(net, *FOLDING, fold_scale_before)
    assert [site.applied for site in report.sites] == [True], report.sites
    assert not list(folded.graph.find_nodes(op="get_attr"))
    assert_same(folded, net, x)
    with torch.autocast("cpu", torch.bfloat16):
        assert folded(x).dtype is net(x).dtype


def test_before_a_layer_that_pads_the_factor_is_folded_and_the_shift_stays():
    net = star(nn.Conv2d(8, 8, 7, padding=3, groups=8))
    folded, (*_, report) = rewrite(net, *FOLDING, fold_scale_before)
    assert report.applied
    [number] = folded.graph.find_nodes(op="get_attr")
    torch.testing.assert_close(folded.get_buffer(number.target), net.shift / net.factor)
    assert_same(folded, net, IMAGE)


@pytest.mark.parametrize("name", STAYS)
def test_numbers_that_stay(name):
    net, reason = STAYS[name]
    kept, (*_, report) = rewrite(net, *FOLDING, fold_scale_before)
    assert [site.applied for site in report.sites] == ([False] if reason else []), report.sites
    assert not reason or reason in report.sites[0].reason
    if name not in ("infinite", "of another type"):
        assert_same(kept, net, IMAGE)


def test_what_is_written_over_before_the_layer_reads_it_stays():
    net = star(
        nn.Conv2d(8, 4, 1),
        act=lambda c: (c.view(-1), F.relu_(c)),
        code=lambda m, y: (z := m.factor * y[1], y[0].add_(1), m.behind(z))[-1],
    )
    kept, (report,) = rewrite(net, fold_scale_before)
    assert "writes in place" in report.sites[0].reason
    assert_same(kept, net, IMAGE)


@pytest.mark.skipif(not kernels.available(), reason=kernels.unavailable() or "it is")
@torch.no_grad()
def test_a_star_relu_costs_one_addition_or_nothing():
    net = nn.Sequential(
        star(nn.Conv2d(8, 8, 3, padding=1, groups=8), act=lambda y: F.relu(y) ** 2),
        star(nn.Conv2d(8, 4, 1), before=nn.Conv2d(8, 8, 1), act=lambda y: F.relu(y) ** 2),
    ).eval()
    fast = force(net, IMAGE)
    [plan] = fast.report.plans
    assert [layer.what.split()[0] for layer in plan.layers] == ["conv2d", "add", *["conv2d"] * 3]
    torch.testing.assert_close(fast(IMAGE), net(IMAGE), rtol=1e-4, atol=1e-4)
