"""A convolution given one signal alone, where the batch norm after it is along another dimension.

(C, L) is a batch of C vectors to BatchNorm1d: with as many features as positions it runs, and
scales the positions.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nhwc import fuse, load, save
from nhwc.graph.modules.folded import FOLDED, Folded
from nhwc.zoo import import_torchvision

from ..fusing import Block, assert_same, fuse_checked, norms, random_, script

SIDE = 6


def signal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def normed(layer):
    """The layer, and `F.batch_norm`, which takes any number of dimensions."""

    def run(self, x):
        n = self.n
        y = self.c(x)
        return F.batch_norm(y, n.running_mean, n.running_var, n.weight, n.bias, eps=n.eps)

    return Block(run, c=layer, n=nn.BatchNorm1d(SIDE))


def asserted():
    """What timm's batch norms do: they assert the dimensions themselves."""

    def run(self, x):
        n = self.n
        y = self.c(x)
        torch._assert(y.ndim == 4, "four dimensions")
        return F.batch_norm(y, n.running_mean, n.running_var, n.weight, n.bias, eps=n.eps)

    return Block(run, c=nn.Conv2d(4, SIDE, 3, padding=1), n=nn.BatchNorm2d(SIDE))


PAIRS = {
    "conv1d": lambda: nn.Sequential(nn.Conv1d(4, SIDE, 3, padding="same"), nn.BatchNorm1d(SIDE)),
    "no bias": lambda: nn.Sequential(
        nn.Conv1d(4, SIDE, 3, padding=1, bias=False), nn.BatchNorm1d(SIDE)
    ),
    "circular": lambda: nn.Sequential(
        nn.Conv1d(4, SIDE, 3, padding=1, padding_mode="circular"), nn.BatchNorm1d(SIDE)
    ),
    "transposed": lambda: nn.Sequential(
        nn.ConvTranspose1d(4, SIDE, 3, padding=1, groups=2), nn.BatchNorm1d(SIDE)
    ),
    "then relu": lambda: nn.Sequential(
        nn.Conv1d(4, SIDE, 3, padding=1), nn.BatchNorm1d(SIDE), nn.ReLU()
    ),
    "functional 1d": lambda: normed(nn.Conv1d(4, SIDE, 3, padding=1)),
    "functional 2d": lambda: normed(nn.Conv2d(4, SIDE, 3, padding=1)),
    "functional 3d": lambda: normed(nn.Conv3d(4, SIDE, 3, padding=1)),
    "functional, transposed 2d": lambda: normed(nn.ConvTranspose2d(4, SIDE, 3, padding=1)),
    "functional, transposed 3d": lambda: normed(nn.ConvTranspose3d(4, SIDE, 3, padding=1)),
    "sync": lambda: nn.SyncBatchNorm.convert_sync_batchnorm(
        nn.Sequential(nn.Conv2d(4, SIDE, 3, padding=1), nn.BatchNorm2d(SIDE))
    ),
}


def shapes(model):
    """One input without a batch and one with, of as many positions as there are features."""
    rank = next(p for p in model.parameters() if p.ndim > 2).ndim
    return signal(4, *[SIDE] * (rank - 2)), signal(2, 4, *[SIDE] * (rank - 2))


@pytest.mark.parametrize("name", PAIRS)
def test_one_signal_alone_is_normed_along_its_positions(name):
    torch.manual_seed(0)
    model = random_(PAIRS[name]())
    alone, batch = shapes(model)
    fused = fuse_checked(model, batch)
    assert not norms(fused)
    assert any(isinstance(module, Folded) for module in fused.modules())
    assert_same(model, fused, alone)
    again = fuse(fused)
    for twin in (copy.deepcopy(fused), script(fused), again):
        assert_same(model, twin, alone)
        assert_same(model, twin, batch)


def test_scales_that_nearly_vanish_lose_no_digits():
    torch.manual_seed(0)
    model = random_(PAIRS["conv1d"]())
    with torch.no_grad():
        model[1].weight.mul_(torch.logspace(-12, 0, SIDE))
        model[1].bias.fill_(100)
    alone, _ = shapes(model)
    wide = copy.deepcopy(model).double()(alone.double())
    error = (fuse(model)(alone) - wide).abs().max() / wide.abs().max()
    assert error < 1e-6


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Conv2d(4, SIDE, 3, padding=1), nn.BatchNorm2d(SIDE)),
        nn.Sequential(nn.Conv3d(4, SIDE, 3, padding=1), nn.BatchNorm3d(SIDE)),
        asserted(),
    ],
)
def test_a_proven_batch_gives_a_plain_convolution(model):
    fused = fuse_checked(random_(model), shapes(model)[1])
    assert not norms(fused)
    assert not any(isinstance(module, FOLDED) for module in fused.modules())
    with pytest.raises((ValueError, RuntimeError, AssertionError)):
        model(shapes(model)[0])


def test_a_frozen_norm_makes_one_image_a_batch():
    frozen = import_torchvision().ops.misc.FrozenBatchNorm2d
    for parts in ((nn.Conv2d(4, SIDE, 3), frozen(SIDE)), (frozen(4), nn.Conv2d(4, SIDE, 3))):
        model = nn.Sequential(*parts).eval()
        fused = fuse_checked(model, signal(2, 4, 8, 8))
        assert not norms(fused)
        assert_same(model, fused, signal(4, 8, 8))
        assert_same(model, script(fused), signal(4, 8, 8))


MUST_NOT = {
    "a scale of zero": (PAIRS["conv1d"], "could not be undone"),
    "before": (
        lambda: nn.Sequential(nn.BatchNorm1d(SIDE), nn.Conv1d(SIDE, SIDE, 3)),
        "may come without a batch",
    ),
    "a second norm": (
        lambda: nn.Sequential(*PAIRS["conv1d"](), nn.BatchNorm1d(SIDE)),
        "holds a batch norm already",
    ),
}


@pytest.mark.parametrize("name", MUST_NOT)
def test_what_cannot_be_undone_is_left_alone(name):
    make, reason = MUST_NOT[name]
    torch.manual_seed(0)
    model = random_(make())
    if "zero" in name:
        with torch.no_grad():
            model[1].weight[0] = 0
    channels = next(m for m in model if isinstance(m, nn.Conv1d)).in_channels
    fused = fuse_checked(model, signal(2, channels, SIDE))
    assert norms(fused)
    assert any(reason in site.reason for site in fused.report.skipped)
    assert_same(model, fused, signal(channels, SIDE))


def test_it_is_saved_and_loaded(tmp_path):
    model = random_(PAIRS["then relu"]())
    save(fuse(model), tmp_path / "model.nhwc")
    loaded = load(tmp_path / "model.nhwc")
    for x in shapes(model):
        assert_same(model, loaded, x)


def test_an_instance_norm_with_statistics_of_one_image(tmp_path):
    """Its channels come first; those of the batch norm that it becomes are the second dimension."""
    model = nn.Sequential(nn.InstanceNorm2d(SIDE, affine=True, track_running_stats=True)).eval()
    random_(model)
    fused = fuse(model)
    save(fused, tmp_path / "norm.nhwc")
    for x in (signal(SIDE, SIDE, SIDE), signal(2, SIDE, 3, 3)):
        for one in (fused, load(tmp_path / "norm.nhwc"), script(fused)):
            torch.testing.assert_close(one(x), model(x))
