"""What the tests of `optimize` share."""

import json
from unittest import mock

import pytest
import torch
from torch import nn

from nhwc import optimize
from nhwc.machine.environment import Environment
from nhwc.plan.ledger import Ledger
from nhwc.zoo import randomize_batchnorm_


class Residual(nn.Module):
    """Convolutions, batch norms, a residual addition and what a classifier ends with."""

    def __init__(self, activation=nn.ReLU):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.act = activation(inplace=True)
        self.one = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(8, 8, 1, groups=2), nn.BatchNorm2d(8))
        self.pre = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.act(self.bn(self.stem(x)))
        x = torch.relu(self.two(self.one(x)) + x)
        x = torch.relu(self.pre(x))
        return self.head(x.mean((2, 3)))


def residual(**options):
    torch.manual_seed(0)
    return randomize_batchnorm_(Residual(**options)).eval()


def force(model, *inputs, **options):
    """The optimized model as if its plan had won: which one wins is for timing, not for tests."""
    return _won_by(("plan", "graph"), model, inputs, options)


def won_by(stage, model, *inputs, **options):
    """The optimized model as if `stage` had won."""
    return _won_by((stage,), model, inputs, options)


def _won_by(stages, model, inputs, options):
    first = lambda compared: next(one for one in stages if one in {"input", *compared})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nhwc._optimize.stages.winner", lambda compared: (first(compared), ""))
        # What is measured again may lead to another choice.
        patch.setattr("nhwc._optimize.stages._AGAIN_S", 0.0)
        return optimize(model, *inputs, **options)


def remembered(kind=""):
    """What was measured here and remembered under keys that begin with `kind`."""
    entries = json.loads(Ledger.of(Environment.here()).path.read_text())["entries"]
    return {key: entry for key, entry in entries.items() if key.startswith(kind)}


def close(a, b, tolerance=2e-5):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def runs_program(fast, *inputs, **by_name):
    """Whether a call with these inputs is served by a program."""
    kind, calls = type(fast.portable), []
    run = kind.__call__

    def noting(graph, *args, **named):
        calls.append(graph)
        return run(graph, *args, **named)

    with mock.patch.object(kind, "__call__", noting):
        fast(*inputs, **by_name)
    return not calls


class Branching(nn.Module):
    """Takes another way by the data: no graph can hold it."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x):
        x = self.body(x)
        return x * 2 if x.mean() > 0 else x - 1


class Aliasing(nn.Module):
    """Writes into a slice that it has looked at before: no graph tells what the view holds then."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        y = self.conv(x)
        some = y[:, :2]
        y[:, :2] = 0
        return y + some.sum()


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x, scale, n):
        y = self.conv(x) * scale
        return {"a": [y, (y.mean(), n)], "size": y.size(2) // 2}
