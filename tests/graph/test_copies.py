"""What functions on a model hold is the copy's in its copy."""

import functools
import types

import pytest
import torch
from torch import fx, nn

import nhwc
from nhwc.models.preserve import copy_as_is

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


def hook_set(graph):
    graph.register_forward_hook(lambda module, given, kwargs, result: result + 1, with_kwargs=True)


def hook_before_set(graph):
    graph.register_forward_pre_hook(lambda module, given: (given[0] + 1,))


def forward_set(graph):
    was = graph.forward
    graph.forward = lambda x: was(x) + 1


@pytest.mark.parametrize("set_on", [hook_set, hook_before_set, forward_set])
@torch.no_grad()
def test_what_is_set_on_a_graph_is_the_copys_too(set_on):
    graph = fx.symbolic_trace(Net().eval())
    set_on(graph)
    for net in (graph, nn.Sequential(graph, nn.BatchNorm2d(3)).eval()):
        torch.testing.assert_close(nhwc.fuse(net)(X), net(X))


def wrapped(layer):
    was = layer.forward
    return lambda x: was(x) + 1


def method(layer):
    was = layer.forward
    return types.MethodType(lambda layer, x: was(x) + 1, layer)


def partial(layer):
    was = layer.forward
    plus = functools.partial(lambda layer, x, *, more: was(x) + more, layer, more=1)
    return lambda x: plus(x)


def enclosing_a_weight(layer):
    weight = layer.weight
    return lambda x: nn.functional.conv2d(x, weight)


@pytest.mark.parametrize("forward", [wrapped, method, partial, enclosing_a_weight])
@torch.no_grad()
def test_a_forward_that_holds_parts_of_the_model_holds_those_of_the_copy(forward):
    net = Net().eval()
    net.conv.forward = forward(net.conv)
    expected, fused = net(X), nhwc.fuse(net)
    for parameter in net.parameters():
        parameter.zero_()
    torch.testing.assert_close(fused(X), expected)
    for parameter in fused.parameters():
        parameter.zero_()
    assert fused(X).unique().numel() == 1


class Features(nn.Module):
    """Reads what hooks on its layers have put into a dict of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
        self.head, self.features = nn.Conv2d(8, 2, 1), {}
        for name in ("0", "2"):
            self.layers.get_submodule(name).register_forward_hook(self.keeper(name))

    def keeper(self, name):
        def keep(module, given, result):
            self.features[name] = result

        return keep

    def forward(self, x):
        self.layers(x)
        return self.head(torch.cat([self.features["0"], self.features["2"]], 1))


@torch.no_grad()
def test_what_hooks_of_a_copy_keep_is_in_the_copy():
    model = Features().eval()
    copied = copy_as_is(model).double()
    copied(X.double())
    assert not model.features
    assert {value.dtype for value in copied.features.values()} == {torch.float64}


@torch.no_grad()
def test_a_model_that_reads_what_its_hooks_keep_is_optimized():
    model = Features().eval()
    fast = nhwc.optimize(model, X)
    assert fast.report.verification.in_float64
    for x in (X, -X, X.repeat(2, 1, 1, 1)):
        torch.testing.assert_close(fast(x), model(x))


seen = {}


def into_seen(module, given, result):
    seen["first"] = result


class ReadsSeen(nn.Module):
    """Has a global dict, into which a hook puts what it reads, as backbones of depth models do."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Conv2d(3, 4, 1)), nn.Conv2d(4, 2, 1)
        self.body.seen = seen
        self.body[0].register_forward_hook(into_seen)

    def forward(self, x):
        self.body(x)
        return self.head(self.body.seen["first"])


class PutsIntoSeen(ReadsSeen):
    def __init__(self):
        super().__init__()
        self.body[0]._forward_hooks.clear()

    def forward(self, x):
        seen["first"] = self.body(x)
        return self.head(self.body.seen["first"])


@pytest.mark.parametrize("kind", [ReadsSeen, PutsIntoSeen])
@pytest.mark.parametrize("verb", ["fuse", "optimize"])
@pytest.mark.parametrize("runs", [0, 1])
@torch.no_grad()
def test_a_copy_has_the_dict_into_which_its_code_writes(kind, verb, runs):
    model = kind().eval()
    seen.clear()
    for x in [X] * runs:
        model(x)
    ours = nhwc.fuse(model) if verb == "fuse" else nhwc.optimize(model, X)
    for x in (X * 2, -X, X.repeat(2, 1, 1, 1)):
        torch.testing.assert_close(ours(x), model(x))
