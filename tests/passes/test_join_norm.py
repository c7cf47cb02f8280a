"""Layer norms, as models spell them, become one layer."""

import pytest
import torch
from torch import nn

import nhwc
from nhwc import kernels
from nhwc.graph.modules.mended import SpelledNorm
from nhwc.passes import FOLDING
from nhwc.passes.join_norm import join_norm

from ..fusing import assert_same, random_, rewrite, script
from ..optimizing import force

IMAGE = torch.randn(2, 6, 5, 4, generator=torch.Generator().manual_seed(0)) + 1


class Norm(nn.Module):
    """`code` of this module, which has weights, and of an image."""

    def __init__(self, code):
        super().__init__()
        torch.manual_seed(0)
        self.code = code
        self.weight, self.bias = (nn.Parameter(torch.rand(6) + 0.5) for _ in range(2))

    def forward(self, x):
        return self.code(self, x)


def convnext(m, x):
    u = x.mean(1, keepdim=True)
    s = (x - u).pow(2).mean(1, keepdim=True)
    x = (x - u) / torch.sqrt(s + 1e-6)
    return m.weight[:, None, None] * x + m.bias[:, None, None]


def nafnet(m, x):
    mu = x.mean(1, keepdim=True)
    var = (x - mu).pow(2).mean(1, keepdim=True)
    y = (x - mu) / (var + 1e-6).sqrt()
    return m.weight.view(1, 6, 1, 1) * y + m.bias.view(1, 6, 1, 1)


def restormer(m, x):
    tokens = x.flatten(2).transpose(1, 2)
    mu = tokens.mean(-1, keepdim=True)
    sigma = tokens.var(-1, keepdim=True, unbiased=False)
    return (tokens - mu) / torch.sqrt(sigma + 1e-5) * m.weight + m.bias


def inverted(m, x):
    centred = x - x.mean(dim=1, keepdim=True)
    variance = torch.mean(centred * centred, dim=1, keepdim=True)
    return torch.rsqrt(1e-4 + variance) * centred * m.weight.view(-1, 1, 1)


def unweighed(m, x):
    centred = x - torch.mean(x, (-3,), True)
    return centred / (torch.square(centred).mean((-3,), True) + 1e-3).sqrt()


def by_steps(m, x):
    x = x.permute(0, 2, 3, 1)
    centred = x - x.mean(-1, keepdim=True)
    variance = torch.var(x, -1, correction=0, keepdim=True)
    return (m.bias + m.weight * (centred / torch.sqrt(variance + 1e-5))).permute(0, 3, 1, 2)


SPELLED = (convnext, nafnet, restormer, inverted, unweighed, by_steps)


def over_other_dimensions(m, x):
    return (x - x.mean(1, keepdim=True)) / (x.var(2, False, True) + 1e-6).sqrt()


def of_a_sample(m, x):
    return (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True) + 1e-6).sqrt()


def without_centre(m, x):
    return x / (x.var(1, False, True) + 1e-6).sqrt()


def of_another(m, x):
    y = x * 2
    return (x - y.mean(1, keepdim=True)) / (x.var(1, False, True) + 1e-6).sqrt()


def written(m, x):
    x = x * 1
    mean = x.mean(1, keepdim=True)
    variance = (x - mean).pow(2).mean(1, keepdim=True)
    x.view(-1).mul_(2)
    return (x - mean) / (variance + 1e-6).sqrt()


def inverse_of_a_root(m, x):
    centred = x - x.mean(1, keepdim=True)
    return centred / (centred.pow(2).mean(1, keepdim=True) + 1e-6).rsqrt()


def of_a_named_mean(m, x):
    return (x - torch.mean(input=x, dim=1, keepdim=True)) / (x.var(1, False, True) + 1e-6).sqrt()


def under_a_named_root(m, x):
    return (x - x.mean(1, keepdim=True)) / torch.sqrt(input=x.var(1, False, True) + 1e-6)


def of_named_squares(m, x):
    centred = x - x.mean(1, keepdim=True)
    return centred / (torch.mean(input=centred.pow(2), dim=1, keepdim=True) + 1e-6).sqrt()


@pytest.mark.parametrize("code", SPELLED)
@torch.no_grad()
def test_a_norm_is_joined(code):
    net = Norm(code).eval()
    joined, (*_, report) = rewrite(net, *FOLDING, join_norm)
    assert [site.applied for site in report.sites] == [True], report.sites
    assert_same(joined, net, IMAGE)
    assert_same(script(joined), net, IMAGE)
    (layer,) = (one for one in joined.modules() if isinstance(one, SpelledNorm))
    assert (layer.weight is None) == (code is unweighed)
    left = {node.target for node in joined.graph.nodes} & {"mean", "var", torch.sqrt, torch.rsqrt}
    assert not left


@pytest.mark.parametrize("code", SPELLED)
@torch.no_grad()
def test_autocast_computes_in_the_types_it_did(code):
    net = Norm(code).eval()
    joined, _ = rewrite(net, *FOLDING, join_norm)
    for x in (IMAGE, IMAGE.bfloat16()):
        with torch.autocast("cpu", torch.bfloat16):
            assert joined(x).dtype is net(x).dtype


@pytest.mark.parametrize(
    "code",
    [
        *(over_other_dimensions, of_a_sample, without_centre, of_another),
        *(written, inverse_of_a_root),
        *(of_a_named_mean, under_a_named_root, of_named_squares),
    ],
)
@torch.no_grad()
def test_what_is_no_layer_norm_stays(code):
    net = Norm(code).eval()
    kept, (*_, report) = rewrite(net, *FOLDING, join_norm)
    assert not report.applied
    assert_same(kept, net, IMAGE)


@torch.no_grad()
def test_a_mean_that_is_read_elsewhere_is_there():
    def code(m, x):
        mean = x.mean(1, keepdim=True)
        return convnext(m, x) + (x - mean) / (x.var(1, False, True) + 1e-6).sqrt() + mean

    net = Norm(code).eval()
    joined, (*_, report) = rewrite(net, *FOLDING, join_norm)
    assert [site.applied for site in report.sites] == [True, True]
    assert_same(joined, net, IMAGE)


@pytest.mark.skipif(not kernels.available(), reason=kernels.unavailable() or "it is")
@pytest.mark.parametrize("code", SPELLED)
@torch.no_grad()
def test_it_is_one_layer_of_ours(code, tmp_path):
    behind = nn.Linear(6, 4) if code is restormer else nn.Conv2d(6, 4, 1)
    net = random_(nn.Sequential(nn.Conv2d(3, 6, 3), Norm(code), behind)).eval()
    x = torch.randn(2, 3, 9, 8)
    fast = force(net, x)
    [plan] = fast.report.plans
    norms = [layer for layer in plan.layers if "Norm" in layer.what]
    assert [one.chosen.kernel for one in norms] == ["nhwc"]
    assert not plan.fallbacks
    nhwc.save(fast, tmp_path / "net.nhwc")
    for given in (x, x * 3 + 40, torch.randn(1, 3, 7, 12)):
        for one in (fast, nhwc.load(tmp_path / "net.nhwc")):
            torch.testing.assert_close(one(given), net(given), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not kernels.available(), reason=kernels.unavailable() or "it is")
@pytest.mark.parametrize("code", [nafnet, restormer])
@torch.no_grad()
def test_weights_may_make_channels_of_one(code):
    net = random_(nn.Sequential(nn.Conv2d(3, 1, 3), Norm(code))).eval()
    x = torch.randn(2, 3, 9, 8)
    torch.testing.assert_close(force(net, x)(x), net(x), rtol=1e-4, atol=1e-4)
