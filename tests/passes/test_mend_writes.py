"""Writes into slices of fresh tensors: which become new tensors, and which stay as they are."""

import pytest
import torch
from torch import nn

from nhwc.passes.fold_constants import fold_constants
from nhwc.passes.mend_writes import mend_writes

from ..fusing import Block, assert_same, rewrite

X = torch.randn(2, 6, 5, 4, generator=torch.Generator().manual_seed(0))


def block(function, **parts):
    return Block(lambda self, x: function(self, x), **parts).eval()


def _half_of_a_bias(self, x):
    bias = self.layer.bias.clone()
    bias[2:4].zero_()
    return nn.functional.linear(x.movedim(1, -1), self.layer.weight, bias)


def _lines(self, x):
    y = x * 2
    y[:, :, 1:3].mul_(3)
    y[..., 0].clamp_(0, 1)
    return y + 1


def _box(self, x):
    """As detectors add a reference to a box: Python assigns what it has written already."""
    y = x * 2
    part = y[..., :2].add_(x[..., 2:])
    y[..., :2] = part
    return y.sigmoid() + 1


GOES = {
    "centre of a box": (_box, 1),
    "half of a bias": (_half_of_a_bias, 1),
    "lines, then a column": (_lines, 2),
}


@pytest.mark.parametrize("name", GOES)
def test_a_write_becomes_a_new_tensor(name):
    function, count = GOES[name]
    model = block(function, layer=nn.Linear(6, 6))
    graph, (report, _) = rewrite(model, mend_writes, fold_constants)
    assert [site.applied for site in report.sites] == [True] * count
    assert not any(str(node.target).endswith("_") for node in graph.graph.nodes)
    assert_same(model, graph, X)


def _of_the_input(self, x):
    x[:, 1:2].zero_()
    return x + 1


def _of_a_view(self, x):
    y = (x + 1).flatten(2)
    y[:, 1:2].zero_()
    return y


def _taken_before(self, x):
    y = x + 1
    part = y[:, :3]
    y[:, 1:2].zero_()
    return y.sum(1) + part.sum(1)


def _read_by_others(self, x):
    y = x + 1
    return y + y[:, 1:2].zero_()


def _written_again(self, x):
    y = x + 1
    y[:, 1:2].mul_(2).relu_()
    return y


STAYS = {
    "the input": (_of_the_input, "what it writes into may be a part of another tensor"),
    "a view": (_of_a_view, "what it writes into may be a part of another tensor"),
    "another part": (_taken_before, "another part was taken before"),
    "a part that is written again": (_written_again, "what it returns may be written into"),
    "a part that is read": (_read_by_others, "what it returns is read"),
}


@pytest.mark.parametrize("name", STAYS)
def test_a_write_that_others_may_see_stays(name):
    function, reason = STAYS[name]
    model = block(function)
    graph, (report,) = rewrite(model, mend_writes)
    assert [site.reason for site in report.sites] == [reason]
    assert_same(model, graph, X)
