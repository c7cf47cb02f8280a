import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nhwc import load_model, optimize
from nhwc.graph.modules.layers import Fused
from nhwc.passes import PASSES
from nhwc.passes.fuse_bn_activation import fuse_bn_activation
from nhwc.passes.fuse_epilogue import fuse_epilogue
from nhwc.passes.mend_tokens import mend_tokens

from ..fusing import Block, assert_same, outputs, random_, rewrite, script

X = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(0))


def conv():
    return nn.Conv2d(4, 4, 1)


def two(run):
    return lambda: Block(lambda self, x: run(x, self.c, self.d), c=conv(), d=conv())


def writes_into_other(x, c, d):
    other = d(x) * 2
    other += c(x)
    return F.relu(other)


def input_changes_between(x, c, d):
    y = x * 1
    a = c(y)
    y.mul_(2)
    return F.relu(a + y)


def tokens_change_between(x, c, d):
    y = c(x)
    n, channels, h, w = x.shape
    images = y.flatten(2).transpose(1, 2).transpose(1, 2).reshape(n, channels, h, w)
    a = d(images)
    y.mul_(2)
    return a + images


def branch_relu_between(x, c, d):
    a = c(x)
    b = F.relu(d(x) * 1, inplace=True)
    return a + b


def asks_for_dimensions(x, c, d):
    y = c(x)
    torch._assert(y.ndim == 4, "images in batches")
    return F.relu(y)


def asks_when_the_input_has_more(x, c, d):
    y = x * 1
    a = c(y)
    y.unsqueeze_(0)
    torch._assert(a.ndim == 4, "images in batches")
    return F.relu(a)


def asks_of_what_cannot_be_fused(x, c, d):
    y = c(x)
    torch._assert(y.dim() == 4, "images in batches")
    return _both(y)


def input_changes_before_the_activation(x, c, d):
    y = x * 1
    a = c(y)
    y.mul_(2)
    return F.relu(a) + y


def input_changes_after_the_add(x, c, d):
    y = x * 1
    a = c(y) + x
    y.mul_(2)
    return F.relu(a) * y


# model, how many Fused layers, and of them how many with a residual
MUST = {
    "module": (lambda: nn.Sequential(conv(), nn.ReLU(inplace=True)), 1, 0),
    "function": (two(lambda x, c, d: F.leaky_relu(c(x), 0.3)), 1, 0),
    "method": (two(lambda x, c, d: c(x).sigmoid()), 1, 0),
    "gelu's approximation": (two(lambda x, c, d: F.gelu(c(x), approximate="tanh")), 1, 0),
    "asserts": (two(asks_for_dimensions), 1, 0),
    "asserts, after a write": (two(asks_when_the_input_has_more), 1, 0),
    "a write before the activation": (two(input_changes_before_the_activation), 1, 0),
    "a write into a branch of its own": (two(branch_relu_between), 1, 1),
    "a write after the add": (two(input_changes_after_the_add), 1, 1),
    "residual": (two(lambda x, c, d: torch.relu(d(F.silu(c(x))) + x)), 2, 1),
    "residual first": (two(lambda x, c, d: x + c(x)), 1, 1),
    "two branches": (two(lambda x, c, d: F.relu(c(x) + d(x))), 1, 1),
    "in place": (two(lambda x, c, d: operator.iadd(c(x), x)), 1, 1),
    "in place, the other branch later": (two(lambda x, c, d: F.relu(c(x).add_(d(x)))), 1, 1),
    "broadcast": (two(lambda x, c, d: F.hardswish(c(x) + x.mean((2, 3), keepdim=True))), 1, 1),
    "called twice": (two(lambda x, c, d: F.relu(c(F.relu(c(x))))), 2, 0),
    "a learned slope": (lambda: nn.Sequential(conv(), nn.PReLU(init=-0.3)), 1, 0),
    "linear": (lambda: nn.Sequential(nn.Linear(5, 3), nn.GELU()), 1, 0),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(4, 3, 2), nn.ReLU6()), 1, 0),
}


@pytest.mark.parametrize("name", MUST)
def test_must_fuse(name):
    build, count, residuals = MUST[name]
    model = build().eval()
    fused, [report] = rewrite(model, fuse_epilogue)
    assert_same(model, fused, X)
    calls = [
        node
        for node in fused.graph.find_nodes(op="call_module")
        if isinstance(fused.get_submodule(node.target), Fused)
    ]
    assert len(calls) == len(report.applied) == count
    assert sum(len(call.args) == 2 for call in calls) == residuals
    assert torch.equal(outputs(script(fused), (X,)), outputs(fused, (X,)))


def hooked():
    model = nn.Sequential(conv(), nn.ReLU())
    model[0].register_forward_hook(lambda module, args, result: result - 1)
    return model


def hooked_activation():
    model = nn.Sequential(conv(), nn.ReLU())
    model[1].register_forward_hook(lambda module, args, result: result - 1)
    return model


MUST_NOT = {
    "another reader": (two(lambda x, c, d: _both(c(x))), ""),
    "another reader, and a question": (two(asks_of_what_cannot_be_fused), ""),
    "hook on the conv": (hooked, "hooks"),
    "hook on the activation": (hooked_activation, ""),
    "the sum is written into the other operand": (two(writes_into_other), "written into"),
    "the input changes before the add": (two(input_changes_between), "in place before it is read"),
    "added to itself": (two(lambda x, c, d: _doubled(c(x))), "added to itself"),
    "a slope for each channel": (lambda: nn.Sequential(conv(), nn.PReLU(4)), ""),
    "a number is added": (two(lambda x, c, d: c(x) + 1), ""),
    "an activation with a threshold computed later": (
        two(lambda x, c, d: F.leaky_relu(c(x), x.mean())),
        "",
    ),
}


def _both(y):
    return F.relu(y) + y


def _doubled(y):
    return y + y


@pytest.mark.parametrize("name", MUST_NOT)
def test_must_not_fuse(name):
    build, reason = MUST_NOT[name]
    model = build().eval()
    if name.endswith("computed later"):
        changed, [report] = rewrite(model, fuse_epilogue)
        assert not report.applied
        return
    changed, [report] = rewrite(model, fuse_epilogue)
    assert_same(model, changed, X)
    assert changed.code == changed.graph.python_code("self").src
    assert not report.applied
    assert all(reason in site.reason for site in report.skipped)
    assert bool(report.skipped) == bool(reason)


def test_a_layer_that_a_pass_added_may_return_a_view():
    model = two(tokens_change_between)().eval()
    changed, [mended, report] = rewrite(model, mend_tokens, fuse_epilogue)
    assert mended.applied
    assert not report.applied
    assert_same(model, changed, X)


def test_a_sum_goes_to_the_layer_that_can_take_it():
    model = two(lambda x, c, d: F.relu(operator.add(c(x), d(x))))().eval()
    model.d.register_forward_hook(lambda module, args, result: result - 1)
    changed, [report] = rewrite(model, fuse_epilogue)
    assert_same(model, changed, X)
    assert [site.where for site in report.applied] == ["c"]


def test_the_inputs_of_a_fused_layer_are_never_written_to():
    layer = Fused(conv(), nn.ReLU(inplace=True))
    x, residual = X.clone(), X.clone()
    outputs(layer, (x, residual))
    layer(x, residual)
    assert torch.equal(x, X)
    assert torch.equal(residual, X)


def add_(x, y):
    return x.add_(y)


class Sums(nn.Module):
    """A block that adds a second input to what its layer returns."""

    def __init__(self, layer, add):
        super().__init__()
        self.c, self.add = layer, add

    def forward(self, x, y):
        return F.relu(self.add(self.c(x), y))


@pytest.mark.parametrize("layer", [conv(), nn.Linear(5, 5), nn.GroupNorm(2, 4)])
@pytest.mark.parametrize("add", [operator.iadd, add_, operator.add])
def test_a_sum_in_place_keeps_the_type_and_the_shape_of_what_it_is_written_into(layer, add):
    model = Sums(layer, add).eval()
    fused, _ = rewrite(model, *PASSES)
    assert sum(isinstance(module, Fused) for module in fused.modules()) == 1
    assert_same(model, fused, X, X.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert outputs(fused, (X, X)).dtype is outputs(model, (X, X)).dtype
    scripted = script(fused)
    if add is operator.add:
        assert_same(model, fused, X[:1], X)
        return
    for one in (model, fused, scripted):
        with pytest.raises(RuntimeError, match="doesn't match the broadcast shape"):
            outputs(one, (X[:1], X))


def test_a_plan_of_a_sum_in_place_of_another_type_that_repeats():
    model = Sums(conv(), operator.iadd).eval()
    inputs = (X, X[:, :, :1, :1].double())
    assert_same(model, optimize(model, *inputs), *inputs)


def test_standalone_batch_norm_and_activation():
    model = random_(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(inplace=True), conv()))
    changed, [report] = rewrite(model, fuse_bn_activation)
    assert_same(model, changed, X)
    assert report.applied[0].what == "0 + ReLU"


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (nn.Sequential(nn.BatchNorm2d(4), nn.ReLU()).train(), "training mode"),
        (nn.Sequential(nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU()).eval(), "running"),
    ],
)
def test_batch_norm_of_the_batch_is_left(model, reason):
    _, [report] = rewrite(model, fuse_bn_activation)
    assert reason in report.skipped[0].reason


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "squeezenet1_1"])
def test_whole_models_through_every_pass(name):
    model = random_(load_model(name))
    changed, reports = rewrite(model, *PASSES)
    assert_same(model, changed, torch.randn(1, 3, 64, 64))
    assert any(report.name == "fuse_epilogue" and report.applied for report in reports)
