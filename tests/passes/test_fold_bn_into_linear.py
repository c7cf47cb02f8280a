import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nhwc.graph.modules.folded import FoldedLinear
from nhwc.models.vision import import_torchvision

from ..fusing import Block, assert_same, fuse_checked, has_no_norm, norms, random_, script

ROWS = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
GRIDS = torch.randn(2, 6, 3, 4, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(5, 2, 3, 1, generator=torch.Generator().manual_seed(0))


def linear(**options):
    return nn.Linear(6, 4, **options)


def functional():
    def run(self, x):
        n = self.n
        y = F.linear(x, self.c.weight, self.c.bias)
        return F.batch_norm(y, n.running_mean, n.running_var, n.weight, n.bias, eps=n.eps)

    return Block(run, c=linear(), n=nn.BatchNorm1d(4))


def by_rows(prepare):
    """As LeViT has it: the batch norm is given rows, whatever images they belong to."""

    def run(self, x):
        y = self.c(prepare(x))
        return self.n(y.flatten(0, 1)).reshape_as(y)

    return Block(run, c=linear(), n=nn.BatchNorm1d(4))


def _overwritten(self, x):
    y = x * 1
    other = y.view(-1)
    normed = self.n(y.flatten(1))
    other.mul_(2)
    return self.l(normed) + y.sum()


MUST = {
    "before, its input overwritten": (
        lambda: Block(lambda self, x: _overwritten(self, x), n=nn.BatchNorm1d(6), l=linear()),
        IMAGES,
    ),
    "after": (lambda: nn.Sequential(linear(), nn.BatchNorm1d(4)), ROWS),
    "no bias": (lambda: nn.Sequential(linear(bias=False), nn.BatchNorm1d(4)), ROWS),
    "no affine": (lambda: nn.Sequential(linear(), nn.BatchNorm1d(4, affine=False)), ROWS),
    "flattened": (lambda: nn.Sequential(nn.Flatten(), linear(), nn.BatchNorm1d(4)), IMAGES),
    "before, flattened": (
        lambda: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(6), nn.Dropout(), linear()),
        IMAGES,
    ),
    "before, a sum of images, pooled": (
        lambda: Block(
            lambda self, x: self.l(self.n((self.c(x) + self.c(x) * 2).mean((2, 3)))),
            c=nn.Conv2d(2, 2, 1),
            n=nn.BatchNorm1d(2),
            l=nn.Linear(2, 4),
        ),
        IMAGES,
    ),
    "rows of images": (lambda: by_rows(lambda x: x.flatten(2).transpose(1, 2)), GRIDS),
    "functional": (functional, ROWS),
    "chain": (
        lambda: nn.Sequential(
            *(linear(), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3), nn.BatchNorm1d(3))
        ),
        ROWS,
    ),
}


@pytest.mark.parametrize("name", MUST)
def test_must_fold(name):
    build, x = MUST[name]
    torch.manual_seed(0)
    model = random_(build())
    fused = fuse_checked(model, x)
    assert has_no_norm(fused)
    assert not fused.report.skipped
    assert_same(model, script(fused), x)


def flat(dims):
    return Block(lambda self, x: self.n(self.c(x.reshape(dims))), c=linear(), n=nn.BatchNorm1d(4))


def test_a_proven_rank_gives_a_plain_linear_layer():
    fused = fuse_checked(random_(flat((-1, 6))), ROWS)
    assert not any(isinstance(module, FoldedLinear) for module in fused.modules())
    assert has_no_norm(fused)


def test_rows_of_sequences_are_right_too():
    """(N, L, C) with L == C: the batch norm goes along L, and nothing but the values shows it."""
    torch.manual_seed(0)
    model = random_(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))
    fused = fuse_checked(model, ROWS)
    x = torch.randn(5, 4, 6)
    assert_same(model, fused, x)
    assert_same(model, script(fused), x)
    again = fuse_checked(fused, ROWS)
    assert_same(model, again, x)


MUST_NOT = {
    # The batch norm is along dimension 1, the linear layer works on the last.
    "three dimensions": (lambda: flat((-1, 4, 6)), torch.randn(5, 4, 6), "3 dimensions"),
    "before, rank unknown": (
        lambda: nn.Sequential(nn.BatchNorm1d(6), linear()),
        ROWS,
        "more than 2 dimensions",
    ),
    "before, of three dimensions and one": (
        lambda: Block(
            lambda self, x: self.l(self.n(self.c(x).mean(3) * self.c(x).mean((0, 2, 3)))),
            c=nn.Conv2d(2, 2, 1),
            n=nn.BatchNorm1d(2),
            l=nn.Linear(2, 4),
        ),
        torch.randn(5, 2, 2, 1),
        "3 dimensions",
    ),
    "rows of nobody knows what": (
        lambda: by_rows(lambda x: x),
        torch.randn(5, 4, 6),
        "more than 3 dimensions",
    ),
    "rows of rows": (
        lambda: by_rows(lambda x: x.reshape(2, 5, 4, 6)),
        torch.randn(10, 4, 6),
        "4 dimensions",
    ),
    "called twice": (
        lambda: Block(
            lambda self, x: self.n(self.c(x)) + self.c(x), c=linear(), n=nn.BatchNorm1d(4)
        ),
        ROWS,
        "called at 2 sites",
    ),
    "another reader": (
        lambda: Block(lambda self, x: _both(self.c(x), self.n), c=linear(), n=nn.BatchNorm1d(4)),
        ROWS,
        "also used by",
    ),
    "features of another length": (
        lambda: nn.Sequential(linear(), nn.Unflatten(1, (4, 1)), nn.BatchNorm1d(4)),
        ROWS,
        "not from a convolution",
    ),
}


def _both(y, n):
    return n(y) + y


@pytest.mark.parametrize("name", MUST_NOT)
def test_must_not_fold(name):
    build, x, reason = MUST_NOT[name]
    fused = fuse_checked(random_(build()), x)
    assert norms(fused)
    [site] = fused.report.skipped
    assert reason in site.reason


def test_a_frozen_norm_that_makes_images_of_rows_stays():
    frozen = import_torchvision().ops.misc.FrozenBatchNorm2d(5)
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), frozen).eval()
    fused = fuse_checked(model, torch.rand(5, 6))
    assert "four dimensions" in fused.report.skipped[0].reason


def test_a_scale_of_zero_is_folded_only_where_the_rank_is_known():
    model = random_(nn.Sequential(linear(), nn.BatchNorm1d(4)))
    with torch.no_grad():
        model[1].weight[0] = 0
    assert "could not be undone" in fuse_checked(model, ROWS).report.skipped[0].reason
