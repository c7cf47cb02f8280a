"""Products and sums with a constant per channel, and layers between two permutes."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nhwc
from nhwc.graph.modules.folded import PromotedFrozenConv2d
from nhwc.graph.modules.mended import ChannelNorm
from nhwc.passes._matching import arithmetic
from nhwc.passes.fold_constants import fold_constants
from nhwc.passes.fold_scale import fold_scale
from nhwc.passes.fold_scale_behind_relu import fold_scale_behind_relu
from nhwc.passes.lift_functional import lift_functional
from nhwc.passes.mend_permute import mend_permute

from ..fusing import Block, assert_same, random_, rewrite

IMAGE = torch.randn(2, 6, 5, 4, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Module):
    """A layer, and its product with a constant of this shape."""

    def __init__(self, layer, *shape, product=torch.mul):
        super().__init__()
        self.layer, self.product = layer, product
        self.scale = nn.Parameter(torch.linspace(-1.5, 2, math.prod(shape)).reshape(shape))

    def forward(self, x):
        return self.product(self.layer(x), self.scale)


class LayerScale(nn.Module):
    """As torchvision and timm write it in ConvNeXt."""

    def __init__(self, *shape):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(6), nn.Linear(6, 8)
        self.scale = nn.Parameter(torch.linspace(-1, 2, 8).reshape(shape))

    def forward(self, x):
        x = self.mix(self.norm(x.permute(0, 2, 3, 1)))
        return self.scale * x.permute(0, 3, 1, 2)


class ScaledByKeyword(LayerScale):
    def forward(self, x):
        x = self.mix(self.norm(x.permute(0, 2, 3, 1)))
        return self.scale * torch.permute(input=x, dims=(0, 3, 1, 2))


FOLDS = {
    "behind a permute by keyword": lambda: ScaledByKeyword(8, 1, 1),
    "conv": lambda: Scaled(nn.Conv2d(6, 8, 3), 8, 1, 1),
    "conv without bias": lambda: Scaled(nn.Conv2d(6, 8, 3, groups=2, bias=False), 8, 1, 1),
    "conv, one of each batch": lambda: Scaled(nn.Conv2d(6, 8, 3), 1, 8, 1, 1),
    "factor first": lambda: Scaled(nn.Conv2d(6, 8, 3), 8, 1, 1, product=lambda x, s: s * x),
    "in place": lambda: Scaled(nn.Conv2d(6, 8, 3), 8, 1, 1, product=lambda x, s: x.mul_(s)),
    "transposed": lambda: Scaled(nn.ConvTranspose2d(6, 8, 2, groups=2), 8, 1, 1),
    "linear": lambda: Scaled(nn.Linear(4, 3), 3),
    "sum": lambda: Scaled(nn.Conv2d(6, 8, 3, bias=False), 8, 1, 1, product=torch.add),
    "conv, sum of each batch": lambda: Scaled(nn.Conv2d(6, 8, 3), 1, 8, 1, 1, product=torch.add),
    "summand first": lambda: Scaled(nn.Conv2d(6, 8, 3), 8, 1, 1, product=lambda x, s: s + x),
    "sum in place": lambda: Scaled(nn.Linear(4, 3), 3, product=lambda x, s: x.add_(s)),
    "behind a permute": lambda: LayerScale(8, 1, 1),
    "behind a permute, one of each batch": lambda: LayerScale(1, 8, 1, 1),
}


@pytest.mark.parametrize("name", FOLDS)
def test_a_constant_per_channel_goes_into_the_layer(name):
    model = random_(FOLDS[name]())
    changed, (report,) = rewrite(model, fold_scale)
    assert [site.applied for site in report.sites] == [True]
    assert not any(map(arithmetic, changed.graph.nodes))
    assert_same(model, changed, IMAGE)
    if name.startswith(("conv", "transposed")):
        assert_same(model, changed, IMAGE[0])


KEPT = {
    "along another dimension": lambda: Scaled(nn.Conv2d(6, 8, 3), 2),
    "a whole image": lambda: Scaled(nn.Conv2d(6, 8, 3), 8, 3, 2),
    "a token each": lambda: Scaled(nn.Linear(4, 3), 5, 1),
    "one for each batch": lambda: Scaled(nn.Linear(4, 3), 1, 3),
    "written into": lambda: Scaled(nn.Conv2d(6, 8, 3), 2, 8, 3, 2, product=lambda x, s: s.add_(x)),
    "read twice": lambda: Scaled(nn.Conv2d(6, 8, 3), 8, 1, 1, product=lambda x, s: x * s + x),
    "not constant": lambda: Block(
        lambda self, x: self.m(x) * x.mean((0, 2, 3))[:, None, None], m=nn.Conv2d(6, 6, 1)
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_other_factors_stay(name):
    model = random_(KEPT[name]())
    changed, (report,) = rewrite(model, fold_scale)
    assert not report.sites
    assert_same(model, changed, IMAGE)


def test_a_layer_called_twice_keeps_its_weights():
    class Twice(Scaled):
        def forward(self, x):
            return self.layer(x) * self.scale + self.layer(x)

    model = random_(Twice(nn.Conv2d(6, 6, 1), 6, 1, 1))
    changed, (report,) = rewrite(model, fold_scale)
    assert [site.reason for site in report.sites] == ["layer is called at 2 sites"]
    assert_same(model, changed, IMAGE)


def test_a_product_that_adds_a_batch_still_adds_one():
    model = random_(Scaled(nn.Conv2d(6, 8, 3), 1, 8, 1, 1))
    changed, _ = rewrite(model, fold_scale)
    assert isinstance(changed.layer, PromotedFrozenConv2d)
    assert changed(IMAGE[0]).shape == (1, 8, 3, 2)


class Frozen(nn.Module):
    """A batch norm as detectors spell it out: of buffers alone."""

    def __init__(self, channels):
        super().__init__()
        for place, name in enumerate(("weight", "bias", "mean")):
            self.register_buffer(name, torch.linspace(-1, 2 + place, channels))
        self.register_buffer("variance", torch.linspace(0.5, 2, channels))

    def forward(self, x):
        weight, bias, mean, variance = (one.reshape(1, -1, 1, 1) for one in self.buffers())
        scale = weight * (variance + 1e-5).rsqrt()
        return x * scale + (bias - mean * scale)


def test_a_batch_norm_of_buffers_goes_into_its_convolution():
    model = nn.Sequential(nn.Conv2d(6, 8, 3, bias=False), Frozen(8), nn.ReLU()).eval()
    changed, (*_, report) = rewrite(model, fold_constants, fold_scale)
    assert [site.what for site in report.sites] == ["0 * 1x8x1x1", "0 + 1x8x1x1"]
    assert_same(model, changed, IMAGE)
    assert_same(model, changed, IMAGE[0])


class Mixer(nn.Module):
    """ConvNeXt's block: to N, H, W, C and back."""

    def __init__(self, there=(0, 2, 3, 1), back=(0, 3, 1, 2), activation=None, affine=True):
        super().__init__()
        self.there, self.back = there, back
        self.norm = nn.LayerNorm(6, elementwise_affine=affine)
        self.wide, self.narrow = nn.Linear(6, 12), nn.Linear(12, 6, bias=False)
        self.activation = activation or nn.GELU()

    def forward(self, x):
        y = self.norm(x.permute(self.there))
        y = self.narrow(self.activation(self.wide(y)))
        return x + torch.permute(y, dims=self.back)


@pytest.mark.parametrize(
    "model",
    [Mixer(), Mixer(activation=nn.Hardswish(inplace=True)), Mixer((0, -2, -1, 1), (0, -1, 1, 2))],
)
def test_layers_between_permutes_become_layers_for_images(model):
    changed, (report,) = rewrite(random_(model), mend_permute)
    assert len(report.applied) == 1
    kinds = [type(module) for _, module in changed.named_children()]
    assert ChannelNorm in kinds
    assert kinds.count(nn.Conv2d) == 2
    assert not any("permute" in str(node.target) for node in changed.graph.nodes)
    for x in (IMAGE, IMAGE.to(memory_format=torch.channels_last)):
        assert_same(model, changed, x)


def test_a_functional_layer_norm_is_one_too():
    model = random_(
        Block(
            lambda self, x: F.layer_norm(
                x.permute(0, 2, 3, 1), self.n.normalized_shape, self.n.weight, self.n.bias, 1e-3
            ).permute(0, 3, 1, 2),
            n=nn.LayerNorm(6),
        )
    )
    lifted, (report,) = rewrite(model, lift_functional)
    assert len(report.applied) == 1
    changed, (report,) = rewrite(lifted, mend_permute)
    assert len(report.applied) == 1
    assert_same(model, changed, IMAGE)


def _norm_of_two(self, x):
    return self.n(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


STAYS = {
    "another order": (lambda: Mixer((0, 3, 2, 1), (0, 3, 2, 1)), None),
    "read between": (
        lambda: Block(
            lambda self, x: (y := self.n(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2) * y.mean(),
            n=nn.LayerNorm(6),
        ),
        "n has 2 readers, and no permute back",
    ),
    "never back": (
        lambda: Block(lambda self, x: self.n(x.permute(0, 2, 3, 1)).sum((1, 2)), n=nn.Linear(6, 4)),
        "sum(): it is neither a layer nor an activation that could run over the channels",
    ),
    "a norm over more": (
        lambda: Block(_norm_of_two, n=nn.LayerNorm((4, 6))), "n: it normalizes over 2 dimensions",
    ),
    "something else between": (
        lambda: Block(
            lambda self, x: self.n(x.permute(0, 2, 3, 1)).cumsum(1).permute(0, 3, 1, 2),
            n=nn.LayerNorm(6),
        ),
        "cumsum(): it is neither a layer nor an activation that could run over the channels",
    ),
    "called twice": (
        lambda: Block(
            lambda self, x: self.n(self.n(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2),
            n=nn.Linear(6, 6),
        ),
        "n: it is called 2 times",
    ),
    "a layer with hooks": (
        lambda: Block(_norm_of_two, n=_hooked(nn.LayerNorm(6))),
        "n: it has hooks",
    ),
    "a layer of a class of its own": (
        lambda: Block(_norm_of_two, n=_Centred(6)), "n: it is a _Centred, a class of its own",
    ),
    "only an activation": (lambda: Block(_norm_of_two, n=nn.ReLU()), None),
}  # fmt: skip


class _Centred(nn.LayerNorm):
    pass


def _hooked(module):
    module.register_forward_hook(lambda m, args, out: out + 1)
    return module


@pytest.mark.parametrize("name", STAYS)
def test_what_is_more_than_that_stays_and_the_report_says_why(name):
    make, reason = STAYS[name]
    model = random_(make())
    changed, (report,) = rewrite(model, mend_permute)
    assert [(site.applied, site.reason) for site in report.sites] == [(False, reason)] * bool(
        reason
    )
    assert_same(model, changed, IMAGE)


@torch.no_grad()
def test_convnext_is_optimized_saved_and_loaded(tmp_path):
    model = random_(nn.Sequential(nn.Conv2d(3, 6, 2, 2), Mixer(), LayerScale(8, 1, 1)))
    x = torch.randn(1, 3, 16, 16)
    fast = nhwc.optimize(model, x)
    assert fast.report.verification.passed
    nhwc.save(fast, tmp_path / "model.nhwc")
    loaded = nhwc.load(tmp_path / "model.nhwc")
    for size in (16, 12):
        given = torch.randn(2, 3, size, size)
        torch.testing.assert_close(loaded(given), model(given), rtol=1e-4, atol=1e-5)


class Affine(nn.Module):
    """What HGNetV2 and its like put behind a ReLU."""

    def __init__(self, factor=1.5, shift=-0.25, *, act=F.relu, twice=False):
        super().__init__()
        self.conv, self.next = nn.Conv2d(6, 8, 3, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.act, self.twice = act, twice
        self.scale = nn.Parameter(torch.tensor([factor]))
        self.bias = nn.Parameter(torch.tensor([shift]))

    def forward(self, x):
        x = self.conv(x)
        y = self.scale * self.act(x) + self.bias
        return self.next(y) + y.mean() + (x.mean() if self.twice else 0)


class FactorAlone(Affine):
    def forward(self, x):
        return self.next(F.relu(self.conv(x)) * self.scale)


class ShiftAlone(Affine):
    def forward(self, x):
        return self.next(self.bias + F.relu(self.conv(x)))


@pytest.mark.parametrize("net", [Affine(), Affine(0.5, 2.0), FactorAlone(), ShiftAlone()])
def test_a_number_behind_a_relu_is_folded(net):
    folded, (report,) = rewrite(net, fold_scale_behind_relu)
    assert [site.applied for site in report.sites] == [True], report.sites
    assert_same(folded, net, IMAGE)
    assert not list(folded.graph.find_nodes(op="get_attr"))


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (Affine(-1.0), "turn the bound"),
        (Affine(0.0), "turn the bound"),
        (Affine(torch.inf), "turn the bound"),
        (Affine(twice=True), "also used without the ReLU"),
        (Affine(act=F.gelu), None),
        (Affine(act=F.relu6), None),
    ],
)
def test_numbers_behind_a_relu_that_stay(net, reason):
    folded, (report,) = rewrite(net, fold_scale_behind_relu)
    assert [site.applied for site in report.sites] == ([False] if reason else [])
    assert not reason or reason in report.sites[0].reason
    if reason != "turn the bound" or net.scale.isfinite():
        assert_same(folded, net, IMAGE)


def test_a_folded_bound_survives_a_file(tmp_path):
    net = random_(Affine())
    fast = nhwc.optimize(net, IMAGE)
    nhwc.save(fast, tmp_path / "net")
    again = nhwc.load(tmp_path / "net")
    torch.testing.assert_close(again(IMAGE), net(IMAGE), rtol=1e-4, atol=1e-5)
