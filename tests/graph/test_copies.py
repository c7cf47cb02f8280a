"""What functions on a model hold is the copy's in its copy."""

import pytest
import torch
from torch import nn

import nhwc

X = torch.randn(1, 3, 4, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return self.conv(x)


def enclosing(net):
    return lambda module, given, result: result * net.scale


def inside(net):
    hook = enclosing(net)
    return lambda module, given, result: hook(module, given, result)


def by_default(net):
    return lambda module, given, result, net=net: result * net.scale


def by_name(net):
    def hook(module, given, result, *, net=net, more=1.5):
        return result * net.scale * hook.more * more

    hook.more = 2.0
    return hook


def named_beside(net):
    return lambda module, given, result, *, more=1.5: result * net.scale * more


@pytest.mark.parametrize("hook", [enclosing, inside, by_default, by_name, named_beside])
@torch.no_grad()
def test_a_hook_of_the_copy_asks_the_copy(hook):
    net = Net().eval()
    net.conv.register_forward_hook(hook(net))
    expected, fused = net(X), nhwc.fuse(net)
    net.scale.mul_(5)
    torch.testing.assert_close(fused(X), expected)


@torch.no_grad()
def test_a_forward_of_the_copy_has_its_defaults():
    net = Net().eval()
    net.forward = lambda x, *, more=1.5: net.conv(x) * more
    torch.testing.assert_close(nhwc.fuse(net)(X), net(X))
