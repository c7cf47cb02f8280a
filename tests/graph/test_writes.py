"""Which nodes write into what was there before them."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from nhwc.graph import written_into


class Calls(nn.Module):
    def __init__(self, does):
        super().__init__()
        self.does, self.act, self.inplace = does, nn.ReLU(), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.does(self, x.exp())


def written(does):
    gm = fx.symbolic_trace(Calls(does))
    return [(node.name, str(written_into(node))) for node in gm.graph.nodes if written_into(node)]


@pytest.mark.parametrize(
    ("does", "node"),
    [
        (lambda m, y: y.add_(1), "add_"),
        (lambda m, y: torch.relu_(y), "relu_"),
        (lambda m, y: F.relu(y, inplace=True), "relu"),
        (lambda m, y: F.relu(y, True), "relu"),
        (lambda m, y: F.hardtanh(y, 0, 1, True), "hardtanh"),
        (lambda m, y: torch.add(y.cos(), 1, out=y), "add"),
        (lambda m, y: m.inplace(y), "inplace"),
    ],
)
def test_writes(does, node):
    assert written(does) == [(node, "exp")]


@pytest.mark.parametrize("function", [operator.imul, operator.itruediv, operator.setitem])
def test_operators_that_write(function):
    graph = fx.Graph()
    value = graph.placeholder("x")
    assert written_into(graph.call_function(function, (value, 2))) is value


@pytest.mark.parametrize(
    "does",
    [
        lambda m, y: y.add(1),
        lambda m, y: m.act(y) + F.relu(y) + F.relu(y, False),
        lambda m, y: (y > 1) & (y < 2),
        lambda m, y: y.__add__(1),
        lambda m, y: torch.max(y, 1)[0],
    ],
)
def test_does_not_write(does):
    assert written(does) == []
