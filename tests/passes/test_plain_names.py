"""Whatever name of torch's a model calls an operator by, passes and plans know it."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nhwc import kernels
from nhwc.passes import FOLDING
from nhwc.passes.plain_names import plain_names

from ..fusing import Block, assert_same, rewrite
from ..optimizing import force

IMAGE = torch.randn(2, 6, 5, 4, generator=torch.Generator().manual_seed(0))

RENAMED = {
    "subtract": (lambda m, x: torch.subtract(x, x * 2, alpha=3), torch.sub),
    "subtract, a method": (lambda m, x: x.subtract(1), "sub"),
    "subtract, in place": (lambda m, x: (x * 2).subtract_(1), "sub_"),
    "multiply": (lambda m, x: torch.multiply(x, 2), torch.mul),
    "divide": (lambda m, x: x.divide(x * x + 1, rounding_mode="floor"), "div"),
    "true_divide": (lambda m, x: torch.true_divide(x, 3), torch.div),
    "negative": (lambda m, x: torch.negative(x), torch.neg),
    "absolute": (lambda m, x: x.absolute(), "abs"),
    "clip": (lambda m, x: x.clip(-0.5, 0.5), "clamp"),
    "concat": (lambda m, x: torch.concat([x, x], 1), torch.cat),
    "an axis": (lambda m, x: torch.concatenate((x, x), axis=1), torch.cat),
    "an axis to sum": (lambda m, x: x.sum(axis=1, keepdims=True), "sum"),
    "a tensor": (lambda m, x: torch.mean(a=x, axis=1), torch.mean),
    "another tensor": (lambda m, x: x.add(x2=x, alpha=2), "add"),
    "swapaxes": (lambda m, x: torch.swapaxes(x, axis0=1, axis1=3), torch.transpose),
    "swapdims": (lambda m, x: x.swapdims(1, 2), "transpose"),
    "moveaxis": (lambda m, x: x.moveaxis(1, -1), "movedim"),
    "split": (lambda m, x: x.split_with_sizes([2, 4], 1)[1], "split"),
    "greater": (lambda m, x: torch.greater(x, 0), torch.gt),
    "expit": (lambda m, x: torch.special.expit(x), torch.sigmoid),
    "an einsum of one": (lambda m, x: torch.einsum("n c h w -> nhcw", x), torch.permute),
    "an einsum of a list": (lambda m, x: torch.einsum("nchw->wnhc", [x]), torch.permute),
    "softmax": (lambda m, x: torch.special.softmax(x, 1), torch.softmax),
}


@pytest.mark.parametrize("name", RENAMED)
def test_a_call_has_one_name(name):
    code, target = RENAMED[name]
    net = Block(code).eval()
    named, (*_, report) = rewrite(net, *FOLDING, plain_names)
    assert report.applied
    node = next(
        n for n in reversed(named.graph.nodes) if n.target not in ("output", operator.getitem)
    )
    assert node.target == target
    assert not {"a", "x2", "axis", "axis0", "keepdims"} & node.kwargs.keys()
    assert_same(named, net, IMAGE)


def test_what_has_its_names_already_stays():
    def code(m, x):
        y = torch.split_with_sizes(x, split_sizes=[2, 4], dim=1)[1]
        sums = torch.einsum("nchw->nch", x)[..., None] + torch.einsum("nchw, nchw -> nchw", x, x)
        diagonals = torch.einsum("ncww->ncw", x[..., :4, :])[..., None]
        return m.norm(x)[:, 2:] + F.softmax(y, dim=1) + (sums[..., :4, :] + diagonals)[:, 2:, :1]

    net = Block(code).eval()
    net.norm = nn.BatchNorm2d(6)
    assert not rewrite(net, *FOLDING, plain_names)[1][-1].applied


@pytest.mark.parametrize(
    "code",
    [
        lambda x: torch.fake_quantize_per_channel_affine(
            x, torch.ones(6), torch.zeros(6), axis=1, quant_min=-8, quant_max=7
        ),
        lambda x: torch.cosine_similarity(x1=x, x2=x * 2 + 1),
        lambda x: torch.trapezoid(x, x=x * 2 + 1),
    ],
)
def test_words_that_are_torchs_own_stay(code):
    net = Block(lambda m, x: code(x)).eval()
    named, (*_, report) = rewrite(net, *FOLDING, plain_names)
    assert not report.applied
    assert_same(named, net, IMAGE)


@pytest.mark.skipif(not kernels.available(), reason=kernels.unavailable() or "it is")
@pytest.mark.parametrize(
    "code",
    [
        lambda m, x: torch.mean(a=torch.clone(input=x), axis=1, keepdims=True),
        lambda m, x: torch.concatenate([x.subtract(1), x.multiply(2)], axis=1),
        lambda m, x: torch.special.expit(x).divide(3).absolute(),
        lambda m, x: torch.prelu(x, m.slope),
        lambda m, x: torch.layer_norm(x.permute(0, 2, 3, 1), (8,), m.slope).permute(0, 3, 1, 2),
        lambda m, x: torch.group_norm(x, 2, m.slope, m.slope),
        lambda m, x: F.leaky_relu_(x, 0.2).tanh_(),
    ],
)
@torch.no_grad()
def test_a_plan_is_one_program_whatever_the_names(code):
    net = Block(lambda m, x: code(m, m.layer(x)) * 2)
    net.layer, net.slope = nn.Conv2d(6, 8, 3), nn.Parameter(torch.rand(8) + 0.5)
    fast = force(net.eval(), IMAGE)
    [plan] = fast.report.plans
    assert not plan.fallbacks
    torch.testing.assert_close(fast(IMAGE), net(IMAGE), rtol=1e-4, atol=1e-5)
