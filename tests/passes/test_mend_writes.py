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


def _queries(self, x):
    """As attention scales its queries, which are seen in another order of their dimensions."""
    queries = (x * 2).flatten(2).transpose(1, 2)
    queries.mul_(0.5)
    return queries @ x.flatten(2)


def _one_hot(self, x):
    """As codebooks choose their entries: what `to` returns may be what it was called on."""
    nearest = x.flatten(1).argmax(1, keepdim=True)
    chosen = torch.zeros(x.shape[0], 120).to(x)
    chosen.scatter_(1, nearest, 1)
    return chosen + x.flatten(1)


GOES = {
    "one of a codebook": (_one_hot, 1),
    "queries": (_queries, 1),
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


def _compared_and_read(self, x):
    """Without a write the comparison would answer in booleans."""
    y = x + 1
    chosen = y[:, 1:2].gt_(1)
    return y.sum(1) + chosen.sum(1), chosen


STAYS = {
    "a comparison that is read": (_compared_and_read, "what it returns is read"),
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


def _seen_through_another_view(self, x):
    y = x * 2
    y.transpose(1, 2).mul_(0.5)
    return y


def _of_the_inputs_view(self, x):
    x.transpose(1, 2).mul_(0.5)
    return x + 1


def _of_another_type(self, x):
    """Without a write the sum would be in float64."""
    y = (x * 2).transpose(1, 2)
    y.add_(x.transpose(1, 2).double())
    return y


def _compared(self, x):
    y = (x * 2).transpose(1, 2)
    y.gt_(0.5)
    return y


def _counted(self, x):
    y = (x > 0).int().transpose(1, 2)
    y.cumsum_(1)
    return y


OTHERWISE = [_seen_through_another_view, _of_the_inputs_view, _of_another_type]


@pytest.mark.parametrize("function", [*OTHERWISE, _compared, _counted])
def test_a_write_into_a_view_stays_if_it_may_be_seen(function):
    model = block(function)
    graph, (report,) = rewrite(model, mend_writes)
    assert report.sites == ()
    assert_same(model, graph, X)
