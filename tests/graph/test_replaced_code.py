"""Code that others have put in the place of torch's own, and hooks on all modules, keep running."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as every_module

import nhwc


def doubled(own):
    return lambda *args, **kwargs: own(*args, **kwargs) * 2


PLACES = {
    "Conv2d.forward": (nn.Conv2d, "forward"),
    "Conv2d._conv_forward": (nn.Conv2d, "_conv_forward"),
    "BatchNorm2d.forward": (nn.BatchNorm2d, "forward"),
    "_BatchNorm.forward": (nn.modules.batchnorm._BatchNorm, "forward"),
    "torch.nn.functional.conv2d": (F, "conv2d"),
    "torch.nn.functional.batch_norm": (F, "batch_norm"),
}


def small():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()


@pytest.mark.parametrize("place", PLACES)
def test_what_others_have_put_in_the_place_of_a_layers_code_is_run(place, monkeypatch):
    owner, name = PLACES[place]
    net, x = small(), torch.rand(2, 3, 8, 8)
    plain = net(x)
    monkeypatch.setattr(owner, name, doubled(getattr(owner, name)))
    expected = net(x)
    assert not torch.equal(expected, plain)
    fused = nhwc.fuse(net)
    torch.testing.assert_close(fused(x), expected)
    torch.testing.assert_close(nhwc.optimize(net, x)(x), expected)
    (opaque,) = fused.report.opaque
    assert opaque.reason == f"others have replaced {place}, which a graph would not run"


class Pointwise(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 4, 3), function

    def forward(self, x):
        return self.function(self.conv(x))


POINTWISE = {
    "torch.nn.functional.relu": (F, "relu", lambda x: F.relu(x)),
    "torch.nn.functional.gelu": (F, "gelu", lambda x: F.gelu(x)),
    "torch.sigmoid": (torch, "sigmoid", lambda x: torch.sigmoid(x)),
    "torch.softmax": (torch, "softmax", lambda x: torch.softmax(x, 1)),
    "Tensor.relu": (torch.Tensor, "relu", lambda x: x.relu()),
}


@pytest.mark.parametrize(
    ("place", "by_partial"), [*((one, False) for one in POINTWISE), ("torch.sigmoid", True)]
)
def test_a_function_that_others_have_replaced_is_run_once(place, by_partial, monkeypatch):
    owner, name, function = POINTWISE[place]
    net, x = Pointwise(function).eval(), torch.rand(2, 3, 8, 8)
    replacement = doubled(getattr(owner, name))
    monkeypatch.setattr(owner, name, functools.partial(replacement) if by_partial else replacement)
    expected = net(x)
    fused = nhwc.fuse(net)
    torch.testing.assert_close(fused(x), expected)
    torch.testing.assert_close(nhwc.optimize(net, x)(x), expected)
    (opaque,) = fused.report.opaque
    assert opaque.reason == f"others have replaced {place}, which a graph would not run"


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook"])
def test_hooks_on_all_modules_are_run(kind):
    def hook(module, args, *result):
        return (result or args)[0] * 2 if isinstance(module, nn.BatchNorm2d) else None

    def forward_pre_hook(module, args):
        return (args[0] * 2,) if isinstance(module, nn.BatchNorm2d) else None

    net, x = small(), torch.rand(2, 3, 8, 8)
    used = hook if kind == "forward_hook" else forward_pre_hook
    handle = getattr(every_module, f"register_module_{kind}")(used)
    try:
        expected = net(x)
        fused = nhwc.fuse(net)
        torch.testing.assert_close(fused(x), expected)
        torch.testing.assert_close(nhwc.optimize(net, x)(x), expected)
    finally:
        handle.remove()
    (opaque,) = fused.report.opaque
    assert opaque.reason == "there are hooks on all modules, which a graph would not call"


def test_a_call_that_others_have_replaced_is_run(monkeypatch):
    own = nn.Module.__call__

    def call(self, x):
        return own(self, x) * (2 if isinstance(self, nn.Conv2d) else 1)

    monkeypatch.setattr(nn.Module, "__call__", call)
    net, x = small(), torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(nhwc.fuse(net)(x), net(x))
    torch.testing.assert_close(nhwc.optimize(net, x)(x), net(x))


def test_sequentials_with_code_of_others_are_traced(monkeypatch):
    own = nn.Sequential.forward
    monkeypatch.setattr(nn.Sequential, "forward", lambda self, x: own(self, x) * 2)
    net, x = small(), torch.rand(2, 3, 8, 8)
    fused = nhwc.fuse(net)
    assert fused.report.opaque == ()
    torch.testing.assert_close(fused(x), net(x))
