"""Under autocast a rewritten model answers in the type of the model, whatever was folded."""

import pytest
import torch
from torch import nn

import nhwc
from nhwc.graph.modules.folded import PROMOTED
from nhwc.passes import PASSES
from nhwc.passes.merge_branches import merge_branches
from nhwc.zoo import import_torchvision

from ..fusing import Block, assert_same, random_, rewrite, script
from ..optimizing import force, runs_program

IMAGE = torch.randn(2, 6, 7, 5, generator=torch.Generator().manual_seed(0))


def scaled(layer, shape, *, by=torch.mul):
    return Block(
        lambda self, x: by(self.layer(x), self.gamma),
        layer=layer,
        gamma=nn.Parameter(torch.linspace(0.5, 2, max(shape)).reshape(shape)),
    )


def merged(join):
    """Branches of the image as it is given, or of one in half precision."""
    return Block(
        lambda self, x: join(self, x),
        one=nn.Conv2d(6, 6, 3, padding=1),
        two=nn.Conv2d(6, 6, 1),
        norm=norm(),
        gamma=nn.Parameter(torch.linspace(0.5, 2, 6).reshape(6, 1, 1)),
    )


def multiply_(y, factor):
    return y.mul_(factor)


def norm():
    return nn.BatchNorm2d(6)


def frozen():
    return import_torchvision().ops.misc.FrozenBatchNorm2d(6)


MODELS = {
    "frozen norm": lambda: (nn.Sequential(nn.Conv2d(6, 6, 3), frozen()), IMAGE),
    "frozen norm before": lambda: (nn.Sequential(frozen(), nn.Conv2d(6, 6, 3)), IMAGE),
    "frozen norm and norm": lambda: (nn.Sequential(nn.Conv2d(6, 6, 3), frozen(), norm()), IMAGE),
    "signal": lambda: (scaled(nn.Conv1d(6, 6, 3), (6, 1)), IMAGE[..., 0]),
    "scale": lambda: (scaled(nn.Conv2d(6, 6, 3), (6, 1, 1)), IMAGE),
    "scale of a batch": lambda: (scaled(nn.Conv2d(6, 6, 3), (1, 6, 1, 1)), IMAGE),
    "summand": lambda: (scaled(nn.Conv2d(6, 6, 3), (6, 1, 1), by=torch.add), IMAGE),
    "in place": lambda: (
        scaled(nn.Conv2d(6, 6, 3), (6, 1, 1), by=multiply_),
        IMAGE,
    ),
    "volume": lambda: (scaled(nn.Conv3d(6, 6, 1), (6, 1, 1, 1)), IMAGE.unsqueeze(2)),
    "transposed signal": lambda: (scaled(nn.ConvTranspose1d(6, 4, 3), (4, 1)), IMAGE[..., 0]),
    "transposed": lambda: (scaled(nn.ConvTranspose2d(6, 4, 3, 2), (4, 1, 1)), IMAGE),
    "transposed volume": lambda: (
        scaled(nn.ConvTranspose3d(6, 4, 1), (4, 1, 1, 1)),
        IMAGE.unsqueeze(2),
    ),
    "rows": lambda: (scaled(nn.Linear(6, 4), (4,)), IMAGE[..., 0].mT),
    "behind ReLU": lambda: (scaled(nn.Sequential(nn.Conv2d(6, 6, 3), nn.ReLU()), (1,)), IMAGE),
    "number behind ReLU": lambda: (
        Block(
            lambda self, x: self.conv(x).relu() * self.number,
            conv=nn.Conv2d(6, 6, 3),
            number=nn.Parameter(torch.tensor(2.0)),
        ),
        IMAGE,
    ),
    "branches": lambda: (merged(lambda self, x: self.one(x) + self.two(x)), IMAGE),
    "branches and image": lambda: (merged(lambda self, x: self.norm(self.one(x)) + x), IMAGE),
    "branches and norm": lambda: (merged(lambda self, x: self.one(x) + self.norm(x)), IMAGE),
    "branches, scaled": lambda: (
        merged(lambda self, x: self.one(x) + self.gamma * self.two(x)),
        IMAGE,
    ),
    "branches of half": lambda: (
        merged(lambda self, x: self.one(y := self.two(x).relu()) + y),
        IMAGE,
    ),
    "mixed twice": lambda: (
        Block(
            lambda self, x: self.second(self.first(x)) * self.gamma,
            first=nn.Conv2d(6, 12, 1),
            second=nn.Conv2d(12, 6, 1),
            gamma=nn.Parameter(torch.ones(6, 1, 1)),
        ),
        IMAGE,
    ),
    "frozen norm, then mixed": lambda: (
        nn.Sequential(nn.Conv2d(6, 12, 1), nn.Conv2d(12, 6, 1, bias=False), frozen()),
        IMAGE,
    ),
    "mixed where it is smaller": lambda: (
        nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(6, 6, 1), frozen()),
        IMAGE,
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_the_type_is_that_of_the_model(name, given):
    model, x = MODELS[name]()
    random_(model)
    for passes in (PASSES, None):
        changed = nhwc.fuse(model, passes=passes) if passes else nhwc.fuse(model)
        assert_same(model, changed, x)
        assert_same(model, script(changed), x)
        with torch.autocast("cpu", torch.bfloat16):
            answers = [one(x.to(given)) for one in (changed, model)]
        torch.testing.assert_close(*answers, rtol=0.05, atol=0.05)


@torch.no_grad()
@pytest.mark.parametrize("name", ["scale", "branches, scaled", "transposed"])
def test_it_is_that_of_the_model_after_planning_and_loading(name, tmp_path):
    model, x = MODELS[name]()
    fast = force(random_(model), x)
    assert runs_program(fast, x)
    nhwc.save(fast, tmp_path / "m.nhwc")
    for one in (fast, nhwc.load(tmp_path / "m.nhwc")):
        assert_same(model, one, x)
        assert any(isinstance(part, PROMOTED) for part in one.modules())
        with torch.autocast("cpu", torch.bfloat16):
            assert one(x).dtype == model(x).dtype == torch.float32


def test_factors_of_another_type_stay():
    model = merged(lambda self, x: self.one(x) + self.gamma * self.two(x)).eval()
    model.gamma.data = model.gamma.data.double()
    changed, (report,) = rewrite(model, merge_branches)
    assert [site.reason for site in report.sites] == [
        "a factor is torch.float64, and the weights are not"
    ]
    assert_same(model, changed, IMAGE)


def test_a_frozen_norm_of_another_type_than_the_convolution_stays():
    model = nn.Sequential(nn.Conv2d(6, 6, 3).bfloat16(), frozen()).eval()
    assert_same(model, nhwc.fuse(model), IMAGE.bfloat16())


def product_of_constants(forward):
    return Block(
        forward,
        layer=nn.Conv2d(6, 6, 1),
        one=nn.Parameter(torch.randn(6, 4)),
        two=nn.Parameter(torch.randn(4, 6)),
    )


PRODUCTS_OF_CONSTANTS = {
    "added": lambda self, x: self.layer(x) + (self.one @ self.two)[:, :1, None],
    "of einsum": lambda self, x: (
        self.layer(x) * torch.einsum("ij,jk->i", self.one, self.two)[:, None, None]
    ),
    "returned": lambda self, x: (self.layer(x), torch.mm(self.one, self.two)),
    "behind others": lambda self, x: self.layer(x) + torch.relu(self.one @ self.two).sum(),
}


@torch.no_grad()
@pytest.mark.parametrize("name", PRODUCTS_OF_CONSTANTS)
def test_a_product_of_constants_has_the_type_that_autocast_gives_it(name):
    model = product_of_constants(PRODUCTS_OF_CONSTANTS[name]).eval()
    for changed in (nhwc.fuse(model), nhwc.optimize(model, IMAGE)):
        assert_same(model, changed, IMAGE)
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(changed(IMAGE), model(IMAGE), rtol=0.05, atol=0.1)


def test_a_product_of_constants_is_folded_where_a_product_reads_it():
    model = product_of_constants(lambda self, x: self.layer(x).mT @ (self.one @ self.two)).eval()
    [report] = [one for one in nhwc.fuse(model).report.passes if one.name == "fold_constants"]
    assert [site.applied for site in report.sites] == [True]
