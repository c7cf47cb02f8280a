"""Norms of each image take over what is added to their results, and the activation after that."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nhwc.graph.modules.mended import GroupNorm, InstanceNorm
from nhwc.passes.fuse_norm_activation import fuse_norm_activation

from ..fusing import assert_same, rewrite

X = torch.randn(2, 4, 5, 6)


class Norms(nn.Module):
    def __init__(self, behind):
        super().__init__()
        self.norm = GroupNorm(nn.GroupNorm(2, 4))
        self.other = InstanceNorm(nn.InstanceNorm2d(4, affine=True))
        self.behind = behind

    def forward(self, x):
        return self.behind(self, x)


def written_sum(net, x):
    y = net.norm(x)
    y += x
    return F.leaky_relu(y, 0.2)


def written_between(net, x):
    x = x * 1
    y = net.norm(x)
    return (y + x.add_(1)).relu()


def into_the_other(net, x):
    y = x * 1
    y.add_(net.norm(x))
    return y.relu() + y


MUST = {
    "activation": (lambda net, x: F.silu(net.norm(x)), ["norm + SiLU"]),
    "sum": (lambda net, x: net.norm(x) + x, ["norm + add"]),
    "sum and activation": (lambda net, x: (x + net.other(x)).relu(), ["other + add + ReLU"]),
    "sum in place": (written_sum, ["norm + add + LeakyReLU"]),
    "sum with what comes later": (lambda net, x: net.norm(x) + x.sin(), ["norm + add"]),
    "two norms": (
        lambda net, x: torch.relu(net.norm(x) + net.other(x)),
        ["norm + add + ReLU"],
    ),
}

MUST_NOT = {
    "itself": (lambda net, x: (y := net.norm(x)) + y, "added to itself"),
    "another reader": (lambda net, x: (y := net.norm(x)).relu() + y, ""),
    "written between": (written_between, "add_() writes in place before it is read"),
    "written into the other": (into_the_other, "written into the other operand"),
    "a number": (lambda net, x: net.norm(x) + 1, ""),
}


@pytest.mark.parametrize("name", MUST)
def test_must_fuse(name):
    behind, what = MUST[name]
    model = Norms(behind).eval()
    changed, [report] = rewrite(model, fuse_norm_activation)
    assert_same(model, changed, X)
    assert [site.what for site in report.applied] == what


@pytest.mark.parametrize("name", MUST_NOT)
def test_must_not_fuse(name):
    behind, reason = MUST_NOT[name]
    model = Norms(behind).eval()
    changed, [report] = rewrite(model, fuse_norm_activation)
    assert_same(model, changed, X)
    assert not report.applied
    assert bool(report.skipped) == bool(reason)
    assert all(reason in site.reason for site in report.skipped)
