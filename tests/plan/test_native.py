"""Our kernels in a plan: every operator they claim computes what torch computes, as programs."""

import operator
import typing
import weakref
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils._pytree import tree_leaves

import nhwc
from nhwc import kernels
from nhwc.formats import Format
from nhwc.graph.modules.folded import FoldedConvTranspose3d
from nhwc.graph.modules.frames import FromFrames, ToFrames
from nhwc.graph.modules.layers import Fused
from nhwc.graph.modules.mended import (
    Attention,
    Cat,
    ChannelNorm,
    ChannelShuffle,
    CircularPad,
    GlobalResponse,
    GridSample,
    GroupNorm,
    InstanceNorm,
    Interleave,
    WeightedSamples,
)
from nhwc.kernels.convolutions.few import filters_served
from nhwc.passes import PASSES, run_passes
from nhwc.plan import UnknownKernel, joining, make_plan, others, remake_plan
from nhwc.plan.assigning import assign
from nhwc.plan.binding import Packed, bind
from nhwc.plan.evidence import RivalTime
from nhwc.plan.implementation import Identifier, Implementation, Timed
from nhwc.plan.ledger import Ledger
from nhwc.plan.measuring import Leisure
from nhwc.plan.native.pairs import EXPANDED, PROJECTED
from nhwc.plan.scene import scene_of
from nhwc.plan.stretch import alone, stretches

pytestmark = pytest.mark.skipif(
    not kernels.available(), reason=kernels.unavailable() or "the kernels are available"
)

NHWC = Format.CHANNELS_LAST


def lowered(function, *inputs):
    """A program in which our kernels compute all they can, and the kernels each layer got."""
    root = function if isinstance(function, nn.Module) else nn.Module()
    graph = fx.GraphModule(root, _Tracer().trace(function))
    scene = scene_of(graph, inputs)
    choice = chosen(scene)
    with torch.no_grad():
        return graph, bind(scene, choice), names(choice)


def chosen(scene):
    """The first of our kernels for every layer that they can compute, torch's for the others."""
    choice = {}
    for layer in scene.layers:
        ours = [one for one in scene.implementations[layer.node] if one.ours]
        torchs = scene.called(layer, Format.CONTIGUOUS, Format.CONTIGUOUS)
        choice[layer.node] = Timed(ours[0] if ours else torchs, 0.0)
    return choice


def names(choice):
    return [timed.implementation.name for timed in choice.values()]


def named(scene, *kernels):
    """For each layer its kernel of this name, channels last."""
    wanted = [Identifier(name, str(NHWC), str(NHWC)) for name in kernels]
    pairs = zip(scene.layers, wanted, strict=True)
    return {layer.node: Timed(scene.find(layer, name), 0.0) for layer, name in pairs}


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m, qualified_name):
        return not isinstance(m, (nn.Sequential, Net))


class Net(nn.Module):
    def forward(self, x):
        raise NotImplementedError


def images(*shapes):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def responding(channels, last=False):
    layer = GlobalResponse(channels, 0.1, last)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


OPERATORS = {
    "max_pool2d": lambda x: F.max_pool2d(x, 3, 2, 1),
    "max_pool2d ceil": lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
    "MaxPool2d": nn.MaxPool2d((3, 2), (2, 1), (1, 0)),
    "MaxPool2d dilated": nn.MaxPool2d(2, dilation=2),
    "AvgPool2d": nn.AvgPool2d(3, 2, 1, count_include_pad=False),
    "AvgPool2d ceil": nn.AvgPool2d(3, 2, ceil_mode=True),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "pad": lambda x: F.pad(x, (1, 2), value=-1),
    "ReflectionPad2d": nn.ReflectionPad2d((2, 1, 0, 3)),
    "CircularPad cut": CircularPad((-2, 3, 2, -1)),
    "lines": lambda x: x[..., 1:, :-1].relu(),
    "cat of lines": lambda x: torch.cat([x, x.relu()], dim=2),
    "max_pool2d of all": lambda x: F.max_pool2d(x, x.shape[2:]),
    "max_pool2d of sizes": lambda x: F.max_pool2d(x, (x.size(2), 2), stride=(x.size(2), 1)),
    "mean by rank": lambda x: x.mean([x.dim() - 2, x.ndim - 1]),
    "AdaptiveAvgPool2d 1": nn.AdaptiveAvgPool2d(1),
    "AdaptiveAvgPool2d": nn.AdaptiveAvgPool2d((3, 2)),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, (1, 1)),
    "mean": lambda x: x.mean([2, 3]),
    "mean kept": lambda x: x.mean((-1, -2), keepdim=True),
    "add": lambda x: x + x * x,
    "add itself": lambda x: x + x,
    "sub": lambda x: x * x - x,
    "gate": lambda x: x * x.mean((2, 3), keepdim=True),
    "map": lambda x: x * torch.sigmoid(x[:, :1]),
    "map first": lambda x: x[:, 3:4].relu() + x,
    "over a map": lambda x: x / (x[:, 3:4].relu() + 1),
    "less a map": lambda x: x - torch.max(x, dim=1, keepdim=True)[0],
    "gate first": lambda x: torch.mul(torch.sigmoid(x.mean((2, 3), keepdim=True)), x),
    "without the mean": lambda x: (x - x.mean((2, 3), keepdim=True)).relu(),
    "with the first": lambda x: (x[:1] * 2 + x).relu(),
    "clamp": lambda x: x.clamp(min=-0.5, max=0.25),
    "number first": lambda x: (1 - x).detach() * 2,
    "inverse of a sigmoid": lambda x: torch.log(x.clamp(0, 1).clamp(min=1e-5)) - x.abs().exp(),
    "largest": lambda x: x * torch.max(x, dim=1, keepdim=True)[0].sigmoid(),
    "largest of lines": lambda x: x.relu().max(2)[0].max(-1)[0] * 2,
    "flatten": lambda x: torch.flatten(x, 1).relu(),
    "view": lambda x: x.view(x.size(0), -1).relu(),
    "Flatten": nn.Sequential(nn.Flatten(), nn.ReLU()),
    "cat": lambda x: torch.cat([x.relu(), x], 1),
    "Cat twice the same": lambda x: torch.cat([x, x, x.relu()], dim=1),
    "chunk": lambda x: torch.cat([x.chunk(2, dim=1)[1], x], 1),
    "split": lambda x: x.split([2, 6], 1)[1] * 1,
    "slice": lambda x: x[:, 3:7].relu(),
    "slice with all sides": lambda x: x[:, :5, :, :].relu(),
    "relu": lambda x: F.relu(x),
    "relu6": lambda x: F.relu6(x),
    "Hardswish": nn.Hardswish(),
    "Hardsigmoid": nn.Hardsigmoid(),
    "SiLU": nn.SiLU(),
    "GELU": nn.GELU(),
    "LeakyReLU": nn.LeakyReLU(0.3),
    "Sigmoid": nn.Sigmoid(),
    "Tanh": nn.Tanh(),
    "Mish": nn.Mish(),
    "ELU": nn.ELU(),
    "SELU": nn.SELU(),
    "CELU": lambda x: torch.celu(x * 2),
    "Softplus": lambda x: F.softplus(x * 9),
    "GELU by tanh": nn.GELU(approximate="tanh"),
    "PReLU": nn.PReLU(8, init=0.3),
    "PReLU shared": nn.PReLU(),
    "ChannelNorm": ChannelNorm(8),
    "GroupNorm": nn.GroupNorm(2, 8),
    "GroupNorm plain": nn.GroupNorm(4, 8, affine=False),
    "InstanceNorm": InstanceNorm(nn.InstanceNorm2d(8, affine=True)),
    "GlobalResponse": responding(8),
    "softmax": lambda x: torch.softmax(x, dim=1),
    "Upsample": nn.Upsample(scale_factor=2),
    "Upsample bilinear": nn.Upsample(scale_factor=(1.7, 0.6), mode="bilinear"),
    "Upsample by less than a pixel": nn.Upsample(scale_factor=1.14),
    "Upsample by a bit more than two": nn.Upsample(scale_factor=(2.1, 1.1)),
    "Upsample exactly": nn.Upsample(scale_factor=1.14, mode="nearest-exact"),
    "interpolate": lambda x: F.interpolate(input=x, size=[9, 4]),
    "interpolate bilinear": lambda x: F.interpolate(x, x.shape[2:], mode="bilinear"),
    "interpolate aligned": lambda x: F.interpolate(x, (13, 12), None, "bilinear", True),
    "interpolate recomputed": lambda x: F.interpolate(
        x, scale_factor=1.3, mode="bilinear", recompute_scale_factor=True
    ),
    "numbers": lambda x: ((2 * x + 1) / 3 - 2) * 0.1,
    "pad with zeros": lambda x: F.pad(x, (0, 1, 2, 0)),
    "pad and cut": lambda x: F.pad(x, (-1, 3, 1, -2), value=0.0),
    "pad by sizes": lambda x: F.pad(x, [x.size(3) % 4, x.size(2) // 7]),
    "ZeroPad2d": nn.ZeroPad2d((1, 2, 3, 0)),
    "AdaptiveMaxPool2d": nn.AdaptiveMaxPool2d(1),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x * 2, (1, 1)),
    "GLU": nn.GLU(1),
    "glu of columns": lambda x: F.glu(x * 2),
    "norm": lambda x: x / x.norm(dim=1, keepdim=True).clamp(min=1e-6),
    "norm, a function": lambda x: torch.norm(x, dim=(2, 3)).relu(),
    "norm of a vector": lambda x: torch.linalg.vector_norm(x * 2, dim=[1], keepdim=True),
    "norm of algebra": lambda x: torch.linalg.norm(x * 2, dim=1, keepdim=True),
    "norm of Frobenius": lambda x: torch.linalg.norm(x, None, (2, 3)).relu(),
    "var": lambda x: x.var(1, keepdim=True) * x,
    "var by the count": lambda x: torch.var(x, (2, 3), unbiased=False).relu(),
    "var by another count": lambda x: torch.var(x, dim=-1, correction=2) + 1,
    "a multiple more": lambda x: torch.add(x, x.relu(), alpha=0.3),
    "a multiple less": lambda x: torch.sub(x, other=x.relu(), alpha=2),
    "a number over": lambda x: 2 / (x.exp() + 1),
    "cubed": lambda x: x**3 + (x * x).pow(0.5),
    "powers": lambda x: x**4 + (x * x + 1) ** -0.5 + (x * x + 1) ** -2,
    "a size": lambda x: x * x.shape[1] ** -0.5 + x.size(2) / 8,
    "bounds by sizes": lambda x: torch.clamp(x, -1 / x.size(1), x.shape[3] / 8),
    "in place": lambda x: (x * 2).neg_().clamp_min_(-0.5).square_().pow_(3),
    "whole": lambda x: torch.floor(x * 3) + (x * 3).ceil() - torch.round(x * 3) + (x * 3).trunc(),
    "erf, log1p": lambda x: torch.erf(x) + torch.log1p(x.abs()),
    "shrunk": lambda x: F.hardshrink(x, 0.3) + F.softshrink(x, 0.2) + F.softsign(x),
    "Hardshrink": nn.Hardshrink(0.3),
    "Threshold": nn.Threshold(0.1, -2),
    "LogSigmoid": nn.LogSigmoid(),
    "threshold": lambda x: F.threshold(x, 0.1, -2.0) + F.logsigmoid(x) + x.sign(),
    "finite": lambda x: torch.nan_to_num(x.sqrt(), nan=0.5),
    "log of a sum": lambda x: (
        x - x.logsumexp(1, keepdim=True) + torch.logsumexp(x, (2, 3)).relu()[..., None, None]
    ),
    "log_softmax": lambda x: F.log_softmax(x, dim=1),
    "log_softmax of lines": lambda x: (x * 2).log_softmax(2),
    "LogSoftmax": nn.LogSoftmax(1),
    "reversed": lambda x: torch.rsub(x, x.relu()) + torch.rsub(x * 2, 1.0),
    "where": lambda x: torch.where(x > 0, x, x.flip(3)),
    "where, a method": lambda x: x.where(x.mean(1, keepdim=True) <= x, -x),
    "where of numbers": lambda x: torch.where(x > 0, 1.0, -1.0) * x,
    "masked_fill": lambda x: x.masked_fill(x > 0.5, -1).masked_fill_(x < -0.5, float("inf")),
    "masked by pixels": lambda x: x.masked_fill((x.sum(1) > 0).unsqueeze(1).expand_as(x), 0),
    "times what is true": lambda x: x * (x != x.amax((2, 3), keepdim=True)) + (x > 0).float() * x,
    "and, or, not": lambda x: x * ((x > 0) & ~(x >= 1) | (x < -1)).to(x.dtype),
    "alike": lambda x: torch.where((x > 0) == (x.flip(3) > 0), x, 0.0) * ((x > 0) ^ (x < 1)),
    "truth of numbers": lambda x: x * x.relu().bool().flip(2).float() + x * x.to(torch.bool),
    "as many as are": lambda x: x / (x > 0).sum(1, keepdim=True).clamp(min=1),
    "as many as": lambda x: x * ((x > 0).sum(dim=(2, 3), keepdim=True) >= x.size(2)),
    "any, all": lambda x: x * (x > 1).any(1, True) - x * (x > -2).all(dim=2, keepdim=True),
    "no numbers": lambda x: torch.where(x.log().isnan() | torch.isinf(1 / x), x, x.exp()),
    "at least, at most": lambda x: torch.clamp_max((x * 2).clamp_min(-0.5), max=0.5),
    "larger": lambda x: torch.maximum(x, x.flip(3)) + torch.max(x, x.mean((2, 3), keepdim=True)),
    "smaller": lambda x: torch.minimum(x, x.flip(3)) + torch.min(x[:, :1], x.relu()),
    "amin": lambda x: x - x.amin(1, keepdim=True),
    "between": lambda x: torch.lerp(x, x.relu(), 0.3) + x.lerp(x.flip(2), 0.7),
    "nothing": lambda x: (0 + x - 0) * 1 + 0.0,
    "BatchNorm2d": nn.BatchNorm2d(8).eval(),
    "ChannelShuffle": ChannelShuffle(4),
    **{
        f"ConvTranspose2d {number}": nn.ConvTranspose2d(8, 6, *arguments)
        for number, arguments in enumerate(
            [
                *((2, 2), (3, 2, 1, 1), (4, 2, 1), (3, (2, 1), 1), (5, 3, 0, 1)),
                *((1, 2, 0, 1), (2, 3), (2, 2, 1), (2, 3, 1), ((3, 1), 4, 1, 2)),
            ]
        )
    },
    "Linear": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
    "Linear of an area": nn.Sequential(nn.Flatten(), nn.Linear(8 * 7 * 6, 5)),
}


def computed_by_ours(function, x, *alike):
    """Check that our kernels compute all of it, of `x` and what is like it; return the graph."""
    graph, program, chosen = lowered(function, x)
    assert all(kernel.startswith("nhwc") for kernel in chosen), chosen
    for given in (x, *alike):
        torch.testing.assert_close(program(given), graph(x), rtol=1e-4, atol=1e-5)
    return graph


@pytest.mark.parametrize("name", OPERATORS)
@torch.no_grad()
def test_our_operator_is_torchs(name):
    (x,) = images((2, 8, 7, 6))
    module = OPERATORS[name]
    function = nn.Sequential(module).eval() if isinstance(module, nn.Module) else module
    computed_by_ours(function, x, x.to(memory_format=torch.channels_last))


@torch.no_grad()
def test_the_log_of_a_sum_of_nothing_is_torchs():
    (x,) = images((2, 8, 7, 6))
    graph, program, _ = lowered(lambda x: x - x[:, :0].logsumexp(1, keepdim=True), x)
    assert torch.equal(program(x), graph(x))


class Repeating(Net):
    """Layers whose sums repeat an operand: what time or a gate says, and places."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(8, 8, 3, padding=1), Fused(nn.Conv2d(8, 8, 1), None)
        self.said = Fused(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU())
        self.gate = Fused(nn.Conv2d(8, 8, 1), nn.ReLU())
        self.time, self.places = nn.Linear(8, 8), nn.Parameter(torch.randn(1, 8, 7, 6))

    def forward(self, x):
        x = self.first(x)
        x = self.said(x, self.time(x.mean((2, 3)))[:, :, None, None])
        x = self.gate(x.mean((2, 3), keepdim=True), x)
        return self.last(x, self.places)


@torch.no_grad()
def test_sums_that_repeat_an_operand_end_no_program():
    (x,) = images((2, 8, 7, 6))
    graph = computed_by_ours(Repeating(), x)
    # Where nothing is repeated, the layer adds it.
    assert len(scene_of(graph, (x[:1],)).layers) == len(scene_of(graph, (x,)).layers) - 1


@pytest.mark.parametrize(
    "code",
    [
        lambda x: torch.linalg.norm(x * 2, ord=2, dim=(2, 3)),
        lambda x: torch.linalg.norm(x * 2, 2, [1, 2], keepdim=True),
    ],
)
@torch.no_grad()
def test_the_norm_of_a_matrix_is_torchs(code):
    (x,) = images((2, 8, 7, 6))
    graph, program, _ = lowered(code, x)
    torch.testing.assert_close(program(x), graph(x), rtol=1e-4, atol=1e-5)


class Named(Net):
    """Has a layer by the name of a function."""

    def __init__(self):
        super().__init__()
        self.max = nn.AdaptiveMaxPool2d(1)

    def forward(self, x):
        return x * self.max(x)


@torch.no_grad()
def test_a_layer_by_the_name_of_a_function_is_itself():
    (x,) = images((2, 8, 7, 6))
    computed_by_ours(Named(), x)


def by_name_of_torchs(name):
    """An operator of somebody else that does something else than torch's of this name."""

    def compute(x: torch.Tensor, n: int = 1) -> torch.Tensor:
        return x.flip(1) * 2 + n

    made = torch.library.custom_op(f"nhwc_test_others::{name}", compute, mutates_args=())
    made.register_fake(lambda x, n=1: torch.empty_like(x))
    return getattr(torch.ops.nhwc_test_others, name)


@pytest.mark.parametrize(
    ("name", "given"),
    [("abs", ()), ("hardswish", ()), ("clone", ()), ("mul", (1,)), ("var", (1,)), ("glu", (1,))],
)
@torch.no_grad()
def test_an_operator_of_others_by_the_name_of_torchs_is_theirs(name, given):
    (x,) = images((2, 8, 7, 6))
    operator = by_name_of_torchs(name)
    expected = operator(x * 2, *given) + 1
    _graph, program, _ = lowered(lambda x: operator(x * 2, *given) + 1, x)
    torch.testing.assert_close(program(x), expected)


class Lifted(Net):
    """Multiplies rows by a number of three dimensions, which gives rows of three dimensions."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.full((1, 1, 1), 0.7))

    def forward(self, x):
        return self.last(torch.relu(self.first(x)) * self.scale)


@torch.no_grad()
def test_rows_by_a_number_of_more_dimensions():
    x = torch.randn(3, 5)
    graph, program, _ = lowered(Lifted(), x)
    torch.testing.assert_close(program(x), graph(x), rtol=1e-4, atol=1e-5)


class Wrapping(Net):
    """Makes tensors of tensors, as MONAI does."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return torch.relu(torch.as_tensor(self.conv(x) * 2) + torch.as_tensor(x))


@torch.no_grad()
def test_a_tensor_of_a_tensor_ends_no_program():
    (x,) = images((2, 8, 7, 6))
    graph = nhwc.fuse(Wrapping().eval())
    scene = scene_of(graph, (x,))
    choice = chosen(scene)
    assert all(kernel.startswith("nhwc") for kernel in names(choice)), names(choice)
    torch.testing.assert_close(bind(scene, choice)(x), graph(x), rtol=1e-4, atol=1e-5)


class Masks(typing.NamedTuple):
    scores: torch.Tensor
    tokens: torch.Tensor


class Segmenting(Net):
    """Returns what may be a view, in a container of its own class."""

    def __init__(self):
        super().__init__()
        self.conv, self.words = nn.Conv2d(8, 8, 1), nn.Linear(8, 8)

    def forward(self, x):
        y, words = self.conv(x), self.words(x.mean(-1).transpose(1, 2))
        return Masks(torch.einsum("bqc,bchw->bqhw", words, y), words.transpose(1, 2).relu())


@torch.no_grad()
def test_what_a_container_holds_is_returned_once():
    (x,) = images((2, 8, 7, 6))
    graph = nhwc.fuse(Segmenting().eval())
    scene = scene_of(graph, (x,))
    choice = chosen(scene)
    layers = names(choice)[:-1]  # The last one makes the container.
    assert all(kernel.startswith("nhwc") for kernel in layers), layers
    found, wanted = bind(scene, choice)(x), graph(x)
    assert type(found) is type(wanted) is Masks
    torch.testing.assert_close(tuple(found), tuple(wanted), rtol=1e-4, atol=1e-5)


class Lacking(Net):
    """Joins an image to what a decoder gets where its encoder has none of that size."""

    def __init__(self):
        super().__init__()
        (self.none,) = images((2, 0, 6, 6))

    def forward(self, x):
        x = x.relu()
        joined = torch.cat([self.none, x, torch.empty(0), x], dim=-3)
        return (
            torch.cat([x, self.none], 1).relu() + 1,
            joined,
            torch.cat([x, self.none.double()], 1),
        )


@torch.no_grad()
def test_parts_without_numbers_end_no_program():
    (x,) = images((2, 8, 6, 6))
    graph, program, chosen = lowered(Lacking(), x)
    assert chosen.count("torch") == 1, chosen  # One makes float64 of float32.
    for found, wanted in zip(program(x), graph(x), strict=True):
        torch.testing.assert_close(found, wanted)
        assert found.stride() == wanted.stride()


@torch.no_grad()
def test_the_places_of_the_largest_numbers_are_torchs():
    (x,) = images((2, 8, 7, 6))

    def places(x):
        largest, where = x.relu().max(1)
        return largest * 2, where

    graph, program, _ = lowered(places, x)
    for found, wanted in zip(program(x), graph(x), strict=True):
        assert torch.equal(found, wanted)


@torch.no_grad()
def test_an_identity_may_be_given_a_list():
    class Listed(Net):
        def __init__(self):
            super().__init__()
            self.same = nn.Identity()

        def forward(self, x):
            several = self.same([x.relu(), x * 2])
            return several[1] * several[0]

    (x,) = images((2, 8, 7, 6))
    graph, program, _ = lowered(Listed(), x)
    torch.testing.assert_close(program(x), graph(x))


class Sampling(Net):
    """Deformable attention: for each token some places of an image, by heads."""

    def __init__(self, padding):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.offsets = nn.Conv2d(8, 8, 1), nn.Linear(8, 2 * 3 * 2)
        self.sample, self.last = GridSample(padding, align_corners=False), nn.Linear(8, 4)

    def forward(self, x):
        n, c, h, w = x.shape
        tokens = self.first(x).flatten(2).transpose(1, 2)
        places = self.offsets(tokens).reshape(n, h * w, 2, 3, 2).transpose(1, 2).flatten(0, 1)
        heads = tokens.reshape(n, h * w, 2, c // 2).flatten(2).transpose(1, 2)
        found = self.sample(heads.reshape(n * 2, c // 2, h, w), places)
        found = found.mean(-1).view(n, c, h * w)
        return self.last(found.transpose(1, 2))


@pytest.mark.parametrize("padding", ["zeros", "border"])
@torch.no_grad()
def test_places_that_a_layer_computes_end_no_program(padding):
    (x,) = images((2, 8, 7, 6))
    graph, program, chosen = lowered(Sampling(padding), x)
    assert all(kernel.startswith("nhwc") for kernel in chosen), chosen
    torch.testing.assert_close(program(x), graph(x), rtol=1e-4, atol=1e-5)


class Deformable(Net):
    """Attention to places of several images, whose values lie together or apart."""

    def __init__(self, together):
        super().__init__()
        torch.manual_seed(0)
        self.value, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.offsets, self.weights = nn.Linear(8, 2 * 7 * 2), nn.Linear(8, 2 * 7)
        self.sample = WeightedSamples("zeros", align_corners=False)
        self.together = together

    def forward(self, x, small):
        n, c, h, w = x.shape
        tokens = [one.flatten(2).transpose(1, 2) for one in (x, small)]
        query = tokens[0]
        if self.together:
            values = self.value(torch.cat(tokens, 1)).split([42, 12], 1)
            values = [values[one] for one in (0, 1)]
        else:
            values = [self.value(one) for one in tokens]
        heads = [
            one.transpose(1, 2).reshape(n * 2, c // 2, *side)
            for one, side in zip(values, ((h, w), (4, 3)), strict=True)
        ]
        count = query.shape[1]
        places = self.offsets(query).tanh().reshape(n, count, 2, 7, 2).split([3, 4], 3)
        places = [places[one].transpose(1, 2).flatten(0, 1) for one in (0, 1)]
        weights = self.weights(query).reshape(n, count, 2, 7).softmax(-1).transpose(1, 2)
        found = self.sample(heads, places, weights.reshape(n * 2, 1, count, 7))
        return self.out(found.view(n, c, count).transpose(1, 2))


@pytest.mark.parametrize("together", [True, False])
@torch.no_grad()
def test_deformable_attention_is_one_program_that_keeps_no_sample(together):
    given = images((2, 8, 7, 6), (2, 8, 4, 3))
    graph, program, chosen = lowered(Deformable(together), *given)
    assert all(kernel.startswith("nhwc") for kernel in chosen), chosen
    torch.testing.assert_close(program(*given), graph(*given), rtol=1e-4, atol=1e-5)


class ByWholeNumbers(Net):
    """Sides of images, and which of them count, are no floats, and are read by arithmetic alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(6, 8)
        self.register_buffer("sides", torch.tensor([[7, 5], [4, 3], [2, 2], [1, 9]]))
        self.register_buffer("counts", torch.tensor([True, False, True, True]))

    def forward(self, x):
        places = self.linear(x).unflatten(2, (4, 2)) / self.sides
        return (places * self.counts[:, None]).flatten(2).relu()


@torch.no_grad()
def test_constants_that_are_no_floats_end_no_program():
    x = torch.randn(2, 5, 6)
    net = ByWholeNumbers()
    graph, program, chosen = lowered(net, x)
    assert all(kernel.startswith("nhwc") for kernel in chosen), chosen
    torch.testing.assert_close(program(x), graph(x))
    assert net.sides.dtype is torch.int64


@torch.no_grad()
def test_constants_that_others_read_stay_whole_numbers():
    class Returned(ByWholeNumbers):
        def forward(self, x):
            return super().forward(x), self.sides // 2, self.counts

    x = torch.randn(2, 5, 6)
    graph, program, _ = lowered(Returned(), x)
    for made, expected in zip(program(x), graph(x), strict=True):
        torch.testing.assert_close(made, expected)


@pytest.mark.parametrize("shape", [(2, 8, 70, 60), (1, 24, 9, 20, 31)])
@torch.no_grad()
def test_norms_keep_their_digits_where_the_mean_is_large(shape):
    x = images(shape)[0] + 100
    norm = nn.GroupNorm(4, shape[1])
    _, program, chosen = lowered(nn.Sequential(norm), x)
    assert chosen == ["nhwc"]
    torch.testing.assert_close(program(x), norm.double()(x.double()).float(), rtol=0, atol=1e-4)


SUMS = {
    "mean": lambda x: x.mean((2, 3)),
    "mean of rows": lambda x: x.flatten(2).mean(-1),
    "pool": lambda x: F.adaptive_avg_pool2d(x, 1),
    "sum": lambda x: x.sum((2, 3)),
    "sum of all": lambda x: x.sum((1, 2, 3)),
}


@pytest.mark.parametrize("name", SUMS)
@torch.no_grad()
def test_sums_of_many_numbers_of_one_sign_keep_their_digits(name):
    x = torch.full((1, 4, 300, 300), 0.1)
    _, program, chosen = lowered(SUMS[name], x)
    assert all(kernel == "nhwc" for kernel in chosen), chosen
    torch.testing.assert_close(program(x), SUMS[name](x.double()).float(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("dims", [(2, 3), (1, 2, 3)])
@torch.no_grad()
def test_sums_of_small_whole_numbers_are_exact(dims):
    x = (torch.arange(49) < torch.arange(50)[:, None, None]).float().view(50, 1, 7, 7)
    x = x.expand(50, 8, 7, 7).contiguous()
    graph, program, chosen = lowered(lambda x: x.sum(dims), x)
    assert chosen == ["nhwc"]
    assert torch.equal(program(x), graph(x))


SIGNS = {
    "twice": lambda x: x * 2,
    "half": lambda x: x / 2,
    "nothing": lambda x: x * 0,
    "negative": lambda x: -x,
    "product": lambda x: x * x.relu(),
    "gate": lambda x: x * x.mean((2, 3), keepdim=True).abs(),
    "less a number": lambda x: x - 0.0,
    "and a number": lambda x: x + 0.0,
    "difference": lambda x: x - x.relu(),
    "GELU": lambda x: F.gelu(x),
    "ELU": nn.ELU(),
    "SELU": nn.SELU(),
    "CELU": lambda x: torch.celu(x * 2),
    "Softplus": lambda x: F.softplus(x * 9),
    "GELU by tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("name", SIGNS)
@torch.no_grad()
def test_zeros_keep_their_signs(name):
    x = torch.tensor([-0.0, 0.0, 1.0, -1.0]).repeat(168).view(2, 8, 7, 6)
    _, program, chosen = lowered(SIGNS[name], x)
    assert all(kernel == "nhwc" for kernel in chosen), chosen
    # oneDNN's GELU loses the sign in float32, on some processors.
    assert torch.equal(program(x).signbit(), SIGNS[name](x.double()).signbit())


VOLUMES = {
    "max_pool3d": lambda x: F.max_pool3d(x, 3, 2, 1),
    "max_pool3d ceil": lambda x: F.max_pool3d(x, (2, 3, 2), (2, 2, 2), ceil_mode=True),
    "MaxPool3d of frames": nn.MaxPool3d((1, 3, 2), (1, 2, 1), (0, 1, 0)),
    "MaxPool3d over frames": nn.MaxPool3d((3, 1, 1), (2, 1, 1), (1, 0, 0)),
    "MaxPool3d dilated": nn.MaxPool3d(2, dilation=(2, 1, 2)),
    "AvgPool3d": nn.AvgPool3d(3, 2, 1, count_include_pad=False),
    "AvgPool3d ceil": nn.AvgPool3d((3, 2, 3), 2, ceil_mode=True),
    "avg_pool3d": lambda x: F.avg_pool3d(x, 2, divisor_override=5),
    "AdaptiveAvgPool3d 1": nn.AdaptiveAvgPool3d(1),
    "mean": lambda x: x.mean([2, 3, 4]),
    "mean kept": lambda x: x.mean((-1, -2, -3), keepdim=True),
    "add": lambda x: x + x * x,
    "sub": lambda x: x * x - x,
    "gate": lambda x: x * x.mean((2, 3, 4), keepdim=True),
    "map": lambda x: x * torch.sigmoid(x[:, :1]),
    "flatten": lambda x: torch.flatten(x, 1).relu(),
    "cat": lambda x: torch.cat([x.relu(), x], 1),
    "chunk": lambda x: torch.cat([x.chunk(2, dim=1)[1], x], 1),
    "slice": lambda x: x[:, 3:7].relu(),
    "SiLU": nn.SiLU(),
    "PReLU": nn.PReLU(8, init=0.3),
    "softmax": lambda x: torch.softmax(x, dim=1),
    "Upsample": nn.Upsample(scale_factor=2),
    "Upsample by less than a pixel": nn.Upsample(scale_factor=1.14),
    "Upsample trilinear": nn.Upsample(scale_factor=(1.7, 0.6, 2), mode="trilinear"),
    "interpolate aligned": lambda x: F.interpolate(x, (7, 13, 12), None, "trilinear", True),
    "interpolate frames": lambda x: F.interpolate(x, (3, 7, 6)),
    "interpolate exactly": lambda x: F.interpolate(x, None, (1, 1.7, 2), "nearest-exact"),
    "Upsample in time": nn.Upsample(scale_factor=(2, 1, 1)),
    "pad in front": lambda x: F.pad(x, (0, 0, 0, 0, 2, 0)),
    "pad with a value": lambda x: F.pad(x, (1, 2, 0, -1), value=0.5),
    "pad by reflection": lambda x: F.pad(x, (1, 2, 3, 1, 2, 0), mode="reflect"),
    "ReplicationPad3d": nn.ReplicationPad3d((1, 0, 2, 0, 3, 1)),
    "ConstantPad3d": nn.ConstantPad3d(1, -2.0),
    "CircularPad": CircularPad((1, 2, 3, 0, 0, 1)),
    "cat of frames": lambda x: torch.cat([x[:, :, :1].repeat(1, 1, 2, 1, 1), x.relu()], dim=2),
    "cat of columns": lambda x: torch.cat([x.relu(), x[..., 1:3], x], -1),
    "frames": lambda x: x[:, :, 1:].relu() + x[:, :, :-1, :, :],
    "every other": lambda x: x[:, :, ::2, 1::3].relu(),
    "frame by frame": lambda x: x.repeat_interleave(2, dim=2),
    "flip": lambda x: x.flip(2, -1),
    "depthwise": nn.Conv3d(8, 8, 3, (2, 1, 1), 1, groups=8),
    "depthwise of two copies": nn.Conv3d(8, 16, (3, 5, 5), 1, (4, 2, 2), (2, 1, 1), 8, False),
    "depthwise in time": nn.Conv3d(8, 8, (5, 1, 1), padding=(2, 0, 0), groups=8),
    "AdaptiveAvgPool3d": nn.AdaptiveAvgPool3d((2, 3, 4)),
    "adaptive_avg_pool3d of frames": lambda x: F.adaptive_avg_pool3d(x, (5, 1, 1)),
    "normalize": lambda x: F.normalize(x.float().clone(), dim=1).type_as(x) * 3,
    "numbers": lambda x: ((2 * x + 1) / 3 - 2) * 0.1,
    "BatchNorm3d": nn.BatchNorm3d(8).eval(),
    "GroupNorm": GroupNorm(nn.GroupNorm(1, 8)),
    "InstanceNorm": InstanceNorm(nn.InstanceNorm3d(8)),
    "Dropout3d": nn.Sequential(nn.Dropout3d(), nn.ReLU()),
    **{
        f"ConvTranspose3d {number}": nn.ConvTranspose3d(8, 5, *arguments)
        for number, arguments in enumerate(
            [(2, 2), (3, 2, 1, 1), ((1, 2, 2), (1, 2, 2)), (3, 1, 1), (4, 2, 1, 0, 1, False)]
        )
    },
}


@pytest.mark.parametrize("name", VOLUMES)
@torch.no_grad()
def test_our_operator_on_volumes_is_torchs(name):
    (x,) = images((2, 8, 5, 7, 6))
    module = VOLUMES[name]
    function = nn.Sequential(module).eval() if isinstance(module, nn.Module) else module
    graph, program, chosen = lowered(function, x)
    assert all(kernel.startswith("nhwc") for kernel in chosen), chosen
    for given in (x, x.to(memory_format=torch.channels_last_3d)):
        torch.testing.assert_close(program(given), graph(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_volumes_and_their_frames_are_the_same_memory():
    class Frames(Net):
        def __init__(self):
            super().__init__()
            self.apart, self.back, self.pool = ToFrames(), FromFrames(), nn.MaxPool2d(2)

        def forward(self, x):
            frames = self.pool(self.apart(x * x, [10, 8, 7, 6]))
            return self.back(frames, [2, 5, 8, 3, 3]).relu()

    (x,) = images((2, 8, 5, 7, 6))
    graph, program, chosen = lowered(Frames(), x)
    assert chosen == ["nhwc"] * 5
    for given in (x, x.to(memory_format=torch.channels_last_3d)):
        torch.testing.assert_close(program(given), graph(x))


FUSED = {
    "group norm": (GroupNorm(nn.GroupNorm(2, 8)), nn.SiLU()),
    "group norm alone": (GroupNorm(nn.GroupNorm(2, 8)), None),
    "instance norm": (InstanceNorm(nn.InstanceNorm3d(8, affine=True)), nn.LeakyReLU(0.2)),
    "transposed": (nn.ConvTranspose3d(8, 8, 3, padding=1), nn.GELU()),
    "transposed, a channel each": (nn.ConvTranspose3d(8, 8, 3, 1, 1, groups=8), nn.ReLU()),
    "transposed and folded": (FoldedConvTranspose3d(8, 8, 3, 1, 1), nn.ReLU()),
}


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", FUSED)
@torch.no_grad()
def test_what_is_added_and_applied_to_a_layer(name, count):
    class Ended(Net):
        def __init__(self, twice):
            super().__init__()
            self.fused, self.twice = Fused(*FUSED[name]), twice

        def forward(self, x):
            more = [x if self.twice else x.relu()] * (count - 1)
            return self.fused(x, *more) * 2

    (x,) = images((2, 8, 5, 7, 6))
    for twice in (False, True):
        graph, program, chosen = lowered(Ended(twice), x)
        assert all(kernel.startswith("nhwc") for kernel in chosen), chosen
        torch.testing.assert_close(program(x), graph(x), rtol=1e-4, atol=1e-4)


FIRST_OF_VOLUMES = [
    nn.Conv3d(3, 16, (1, 3, 3), (1, 2, 2), (0, 1, 1)),
    nn.Conv3d(3, 16, 3, (2, 1, 1), 1),
    nn.Conv3d(3, 8, (3, 1, 3), 1, (2, 0, 1), (2, 1, 1)),
    nn.Conv3d(1, 24, 3, 2),
    nn.Conv3d(4, 16, 3, padding=1),
]


@pytest.mark.parametrize("layer", FIRST_OF_VOLUMES, ids=repr)
@torch.no_grad()
def test_frames_of_few_channels_that_lie_as_planes(layer):
    """A contiguous volume holds no frame in one piece, as the first layer's kernel reads images."""
    net = nn.Sequential(layer)
    (x,) = images((2, layer.in_channels, 4, 16, 32))
    scene = scene_of(fx.GraphModule(net, _Tracer().trace(net)), [x])
    (layer,) = scene.layers
    stems = [one for one in scene.implementations[layer.node] if one.name == "nhwc stem"]
    assert len(stems) == 2
    for one in stems:
        for given in (x, x.to(memory_format=torch.channels_last_3d)):
            program = alone(scene.record, layer, one, scene.constants(layer))
            torch.testing.assert_close(program(given), net(x), rtol=1e-4, atol=1e-5)


FEW = {
    "convolution": (nn.Conv2d(8, 2, (3, 9), padding=(1, 4)), True),
    "transposed": (nn.ConvTranspose2d(8, 1, 4, 2, 1), False),
    "transposed, of odd sizes": (nn.ConvTranspose2d(8, 1, 3, 2, 1), False),
}


@pytest.mark.parametrize("name", FEW)
@torch.no_grad()
def test_few_filters(name):
    """Lanes that are summed: exact, but for rows of a stride, of which each sees what all see."""
    module, exact = FEW[name]
    net = nn.Sequential(module)
    graph = fx.GraphModule(net, _Tracer().trace(net))
    (x,) = images((2, 8, 12, 16))
    scene = scene_of(graph, [x])
    (layer,) = scene.layers
    ours = [one for one in scene.implementations[layer.node] if one.ours]
    assert "nhwc few" in [one.name for one in ours]
    for one in ours:
        program = alone(scene.record, layer, one, scene.constants(layer))
        torch.testing.assert_close(program(x), graph(x), rtol=1e-4, atol=1e-5)
    offered = scene_of(graph, [x], exact=True).implementations[layer.node]
    assert ("nhwc few" in [one.name for one in offered]) == exact


@torch.no_grad()
def test_few_filters_beside_others():
    """In a concatenation, and with a slice added, where they do not lie without gaps."""

    class Beside(Net):
        def __init__(self):
            super().__init__()
            self.wide, self.few = nn.Conv2d(8, 12, 1), nn.Conv2d(8, 2, (3, 9), padding=(1, 4))

        def forward(self, x):
            wide = self.wide(x)
            few = self.few(x) + wide[:, 3:5]
            return torch.cat([wide, few], 1)

    (x,) = images((2, 8, 12, 16))
    net = Beside()
    graph = fx.GraphModule(net, _Tracer().trace(net))
    for residual in (False, True):
        if residual:
            run_passes(graph, PASSES)
        scene = scene_of(graph, [x])
        choice = chosen(scene)
        [few] = [one for one in scene.layers if "few" in one.node.name]
        assert len(few.inputs) == 1 + residual
        offered = {one.name: one for one in scene.implementations[few.node]}
        choice[few.node] = Timed(offered["nhwc few"], 0.0)
        torch.testing.assert_close(bind(scene, choice)(x), net(x), rtol=1e-4, atol=1e-5)


DILATED = {
    "one tap sees the image": (16, 24, 3, {"padding": 24, "dilation": 24}),
    "a row of taps": (16, 24, 3, {"padding": (24, 1), "dilation": (24, 1)}),
    "taps without the first": (8, 9, 3, {"padding": (9, 2), "dilation": (5, 1)}),
    "strided and grouped": (16, 24, 3, {"padding": 8, "dilation": 8, "stride": 2, "groups": 2}),
    "rows that some outputs do not see": (32, 24, 3, {"padding": 5, "dilation": 5}),
    "strided rows": (24, 40, 5, {"padding": 8, "dilation": 4, "stride": 2}),
    "depthwise": (16, 16, 3, {"padding": 9, "dilation": 9, "groups": 16}),
    "more padding than image": (16, 8, 3, {"padding": 20, "dilation": 3}),
}


@pytest.mark.parametrize("name", DILATED)
@torch.no_grad()
def test_taps_that_see_only_padding_are_left_out(name):
    c, k, size, settings = DILATED[name]
    conv = nn.Conv2d(c, k, size, **settings)
    (x,) = images((2, c, 8, 7))
    scene = scene_of(fx.GraphModule(nn.Sequential(conv), _Tracer().trace(nn.Sequential(conv))), [x])
    (layer,) = scene.layers
    expected = conv.double()(x.double()).float()
    conv.float()
    ours = [one for one in scene.implementations[layer.node] if one.ours and one.reads is NHWC]
    assert ours
    for one in ours:
        program = bind(scene, {layer.node: Timed(one, 0.0)})
        torch.testing.assert_close(program(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("conv", "shape"),
    [
        (nn.Conv2d(24, 40, 1), (3, 24, 1, 1)),
        (nn.Conv2d(24, 7, 3, 2, 1, bias=False), (3, 24, 1, 1)),
        (nn.Conv3d(24, 7, 1), (3, 24, 5, 1, 1)),
    ],
)
@torch.no_grad()
def test_images_of_one_pixel_may_be_rows_of_a_linear_layer(conv, shape):
    net = nn.Sequential(Fused(conv, nn.GELU()))
    (x,) = images(shape)
    scene = scene_of(fx.GraphModule(net, _Tracer().trace(net)), [x])
    (layer,) = scene.layers
    ours = [one for one in scene.implementations[layer.node] if one.ours]
    assert [one.name for one in ours] == ["nhwc pointwise", "nhwc linear"]
    for one in ours:
        program = bind(scene, {layer.node: Timed(one, 0.0)})
        torch.testing.assert_close(program(x), net(x), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_one_pixel_gives_many_where_the_padding_is_wide():
    """One tap of each filter meets the pixel, elsewhere the result is the bias alone."""
    net = nn.Sequential(Fused(nn.Conv2d(4, 6, (1, 5), padding=(0, 7), dilation=3), nn.GELU()))
    (x,) = images((2, 4, 1, 1))
    scene = scene_of(fx.GraphModule(net, _Tracer().trace(net)), [x])
    (layer,) = scene.layers
    ours = [one for one in scene.implementations[layer.node] if one.ours]
    few = {"nhwc few"} if 6 in filters_served() else set()
    assert {one.name for one in ours} == {"nhwc pointwise", *few}
    for one in ours:
        program = bind(scene, {layer.node: Timed(one, 0.0)})
        torch.testing.assert_close(program(x), net(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("norm", [InstanceNorm(nn.InstanceNorm2d(5)), nn.GroupNorm(5, 5)])
@pytest.mark.parametrize("size", [19, 90])
@torch.no_grad()
def test_what_is_the_same_everywhere_is_nothing_beside_its_mean(norm, size):
    x = torch.tensor([3.7, -0.1, 1e4, 0.0, 7e-3]).view(1, 5, 1, 1).expand(2, 5, size, 17)
    x = x.contiguous(memory_format=torch.channels_last)
    _, program, kernels = lowered(nn.Sequential(norm), x)
    assert kernels == ["nhwc"]
    assert program(x).abs().max() == 0


@torch.no_grad()
def test_who_reads_a_view_knows_its_layout_only_when_it_is_made():
    def moved(conv, x):
        y = conv(x)
        return F.pixel_shuffle(y.squeeze(0), 2), y.squeeze(1)

    conv = nn.Conv3d(3, 8, 1)
    net = Calling(moved, conv)
    x = torch.randn(2, 3, 4, 6, 6)
    scene = scene_of(fx.GraphModule(net, _Tracer().trace(net)), [x])
    choice = chosen(scene)
    assert names(choice) == ["nhwc pointwise", "nhwc", "nhwc", "nhwc"]
    shuffle = scene.layers[2]
    choice[shuffle.node] = Timed(scene.called(shuffle, Format.CONTIGUOUS, Format.CONTIGUOUS), 0.0)
    # torch refuses to shuffle a volume's pixels in channels last.
    for found, expected in zip(bind(scene, choice)(x), net(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert found.stride() == expected.stride()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@torch.no_grad()
def test_layers_without_inputs_are_torchs():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ZeroPad2d((-1, -1, 0, 0)), nn.Linear(0, 5))
    (x,) = images((2, 3, 4, 2))
    torch.testing.assert_close(nhwc.optimize(net.eval(), x)(x), net(x))


class Calling(nn.Module):
    """A function of a layer and an image."""

    def __init__(self, function, layer):
        super().__init__()
        self.function, self.layer = function, layer

    def forward(self, x):
        return self.function(self.layer, x)


@pytest.mark.parametrize("shape", [(3, 37, 3 * 24), (37, 3 * 24)])
@pytest.mark.parametrize("batch_first", [True, False])
@torch.no_grad()
def test_attention_of_packed_rows(batch_first, shape):
    x = torch.randn(shape)
    graph, program, chosen = lowered(nn.Sequential(Attention(4, batch_first)), x)
    assert chosen == ["nhwc"]
    torch.testing.assert_close(program(x), graph(x), rtol=1e-4, atol=1e-5)
    # All scores of one query are minus infinity.
    x[..., 24:48] = x[..., 24:48].abs() + 0.1
    x.view(-1, 72)[0, :24] = float("-inf")
    expected = graph(x)
    assert not expected.isnan().any()
    torch.testing.assert_close(program(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(8, 1, 1), (1, 8, 1, 1)])
@torch.no_grad()
def test_a_factor_for_each_channel(shape):
    class Scales(Net):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(images(shape)[0])

        def forward(self, x):
            return self.scale * (x * self.scale).relu()

    (x,) = images((3, 8, 7, 6))
    graph, program, chosen = lowered(Scales(), x)
    assert chosen == ["nhwc"] * 3
    torch.testing.assert_close(program(x), graph(x))


@pytest.mark.parametrize("module", [Cat(), Interleave()])
@torch.no_grad()
def test_our_mended_modules(module):
    class Two(Net):
        def __init__(self):
            super().__init__()
            self.part = module

        def forward(self, a, b):
            return self.part([b, a])

    graph, program, chosen = lowered(Two(), *images((2, 4, 5, 5), (2, 4, 5, 5)))
    assert chosen == ["nhwc"]
    inputs = images((2, 4, 5, 5), (2, 4, 5, 5))
    torch.testing.assert_close(program(*inputs), graph(*inputs))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + True,
        lambda x: F.max_pool2d(x, x.argmax().clamp(2, 2).item()),
        lambda x: x.std(1),
        lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
        lambda x: x.double(),
        lambda x: F.elu(x, 0.5),
        lambda x: x.norm(1, dim=1),
        lambda x: F.adaptive_max_pool2d(x, 2),
        lambda x: F.tanhshrink(x),
        lambda x: torch.pow(x, exponent=3),
        lambda x: F.normalize(x, eps=1e-40),
        lambda x: F.interpolate(x, scale_factor=2, mode="bicubic"),
        lambda x: F.interpolate(x, (5, 5), mode="bilinear", antialias=True),
        lambda x: torch.cat(x.chunk(2, dim=1)[::-1], 1),
    ],
)
@torch.no_grad()
def test_what_our_kernels_do_not_know_is_left_to_torch(function):
    (x,) = images((2, 8, 6, 6))
    graph, program, chosen = lowered(function, x)
    assert "torch" in chosen
    torch.testing.assert_close(program(x), graph(x))


SINGLE = {
    "a volume, means": (nn.AdaptiveAvgPool3d((2, 3, 2)), (3, 6, 8, 8)),
    "a volume, means of F": (lambda x: F.adaptive_avg_pool3d(x, (2, 3, 2)), (3, 6, 8, 8)),
    "a volume, largest": (nn.MaxPool3d(2), (3, 6, 8, 8)),
    "a volume, windows": (lambda x: F.avg_pool3d(x, (1, 2, 2)), (3, 6, 8, 8)),
    "a volume, norm": (InstanceNorm(nn.InstanceNorm3d(3, affine=True)), (3, 6, 8, 8)),
    "a volume, padding": (nn.ReplicationPad3d(1), (3, 6, 8, 8)),
    "a volume, transposed": (nn.ConvTranspose3d(3, 8, 2, stride=2), (3, 6, 8, 8)),
    "an image, norm": (InstanceNorm(nn.InstanceNorm2d(3, affine=True)), (3, 8, 8)),
    "an image, transposed": (Fused(nn.ConvTranspose2d(3, 8, 2, 2), nn.ReLU()), (3, 8, 8)),
    "an image, transposed in groups": (nn.ConvTranspose2d(8, 4, 3, 2, groups=4), (8, 8, 8)),
    "an image, dilated": (nn.ConvTranspose2d(8, 8, 3, 2, dilation=3, groups=8), (8, 8, 8)),
    "an image, means": (nn.AdaptiveAvgPool2d((3, 2)), (3, 8, 8)),
    "an image, windows": (nn.AvgPool2d((2, 1)), (3, 8, 8)),
    "a signal, largest": (nn.MaxPool1d(2), (8, 8)),
}


@pytest.mark.parametrize("name", SINGLE)
@torch.no_grad()
def test_one_image_or_volume_without_a_batch(name):
    """Its channels stand where those of a batch of images do not."""
    layer, shape = SINGLE[name]
    (x,) = images(shape)
    function = nn.Sequential(layer).eval() if isinstance(layer, nn.Module) else layer
    graph, program, _ = lowered(function, x)
    torch.testing.assert_close(program(x), graph(x))


ROWS = {
    "Linear": nn.Linear(24, 40),
    "Linear without bias": nn.Linear(24, 7, bias=False),
    "Linear and GELU": Fused(nn.Linear(24, 40), nn.GELU()),
    "LayerNorm": nn.LayerNorm(24),
    "LayerNorm plain": nn.LayerNorm(24, elementwise_affine=False),
    "GELU": nn.GELU(),
    "silu": lambda x: F.silu(x),
    "add": lambda x: x + x.relu(),
    "multiply": lambda x: x * x.sigmoid(),
    "scale": lambda x: x * 0.3,
    "shift": lambda x: 2 + x - 0.5,
    "block": nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 24)),
}


@pytest.mark.parametrize("shape", [(2, 7, 24), (1, 53, 24), (6, 24)])
@pytest.mark.parametrize("name", ROWS)
@torch.no_grad()
def test_rows_of_channels(name, shape):
    (x,) = images(shape)
    layer = ROWS[name]
    graph, program, chosen = lowered(nn.Sequential(layer) if name[0].isupper() else layer, x)
    assert all(kernel.startswith("nhwc") for kernel in chosen)
    torch.testing.assert_close(program(x), graph(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(9,), (2, 3, 5, 9), (1, 8, 5, 7, 9), (2, 1, 2, 1, 2, 9)])
@torch.no_grad()
def test_rows_in_any_number_of_dimensions(shape):
    (x,) = images(shape)
    graph, program, _ = lowered(nn.Sequential(nn.Linear(9, 4), nn.ReLU()), x)
    torch.testing.assert_close(program(x), graph(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_rows_that_lie_otherwise_and_a_residual():
    class Adds(Net):
        def __init__(self):
            super().__init__()
            self.layer = Fused(nn.Linear(7, 24), nn.ReLU())

        def forward(self, x, y):
            return self.layer(x.transpose(1, 2), y)

    inputs = images((3, 7, 20), (3, 20, 24))
    graph, program, chosen = lowered(Adds(), *inputs)
    assert chosen == ["nhwc", "nhwc pointwise"]
    torch.testing.assert_close(program(*inputs), graph(*inputs), rtol=1e-4, atol=1e-5)


class Collects(nn.Module):
    """Tokens of an image in torch's order, of which a block adds to each: all are returned."""

    def __init__(self):
        super().__init__()
        self.patches, self.layer = nn.Conv2d(3, 24, 4, 4), nn.Linear(24, 24)
        self.places = nn.Parameter(torch.randn(1, 20, 24))

    def forward(self, x):
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places
        more = tokens + self.layer(tokens)
        return more, [tokens, more.transpose(1, 2).relu()]


@torch.no_grad()
def test_rows_are_returned_in_the_strides_that_torch_gives_them():
    (x,) = images((3, 3, 16, 20))
    graph, program, chosen = lowered(Collects().eval(), x)
    assert all(kernel.startswith("nhwc") for kernel in chosen), chosen
    for result, wanted in zip(*map(tree_leaves, (program(x), graph(x))), strict=True):
        assert result.stride() == wanted.stride()
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.chunk(2, dim=1)[1],
        lambda x: x[:, 1:3],
        nn.AdaptiveAvgPool2d(1),
        nn.AvgPool2d(2),
        nn.PReLU(8),
        nn.LayerNorm((8, 24)),
    ],
)
@torch.no_grad()
def test_of_rows_the_second_dimension_is_not_that_of_the_channels(function):
    (x,) = images((3, 8, 24))
    graph, program, chosen = lowered(function, x)
    assert "torch" in chosen
    result, wanted = program(x), graph(x)
    torch.testing.assert_close(result, wanted)
    assert result.stride() == wanted.stride()


@pytest.mark.parametrize("times", [2, 3])
@torch.no_grad()
def test_a_depthwise_convolution_with_several_filters_for_each_channel(times):
    (x,) = images((2, 10, 13, 11))
    layer = nn.Conv2d(10, times * 10, 5, stride=2, padding=2, groups=10)
    graph, program, chosen = lowered(nn.Sequential(layer, nn.ReLU()), x)
    assert chosen == ["nhwc depthwise", "nhwc"]
    torch.testing.assert_close(program(x), graph(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_several_tensors_at_once_are_returned_by_torch():
    (x,) = images((2, 8, 6, 6))
    graph, program, _ = lowered(lambda x: x.relu().chunk(2, dim=1), x)
    torch.testing.assert_close(program(x), graph(x))


class Branches(Net):
    """Two branches, one through an operator that only torch has, and three results."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        a = self.a(x)
        left, right = a.chunk(2, 1)
        b = F.elu(self.b(x.sin()))
        c = torch.cat([right, b, left], 1)
        return {"c": c, "mean": (c.mean((2, 3)), a)}


class Wide(Net):
    """A 1x1 convolution before a depthwise one; `between` is what stands between them."""

    def __init__(self, between=None, widening=1, **last):
        super().__init__()
        self.stem = nn.Conv2d(8, 8, 1)
        self.widen = nn.Conv2d(8, 40, 1, stride=widening)
        self.depthwise = nn.Conv2d(40, 40, 3, **{"padding": 1, "groups": 40, **last})
        self.narrow = nn.Conv2d(40, 8, 1)
        self.between = between or (lambda wide, result: result)

    def forward(self, x):
        wide = self.widen(self.stem(x))
        return self.narrow(self.between(wide, self.depthwise(wide)))


class Residual(Wide):
    """The depthwise convolution adds what it reads, as `fuse_epilogue` writes it."""

    def __init__(self):
        super().__init__()
        self.depthwise = Fused(self.depthwise, nn.ReLU())

    def forward(self, x):
        wide = self.widen(self.stem(x))
        return self.narrow(self.depthwise(wide, wide))


EXPANDS, PROJECTS = ("widen", "depthwise"), ("depthwise", "narrow")
WIDE = {
    "stride 1": (Wide(), [EXPANDS, PROJECTS]),
    "stride 2": (Wide(stride=2), [EXPANDS, PROJECTS]),
    "no bias": (Wide(bias=False), [EXPANDS, PROJECTS]),
    "padding 0": (Wide(padding=0), [EXPANDS, PROJECTS]),
    "strided expansion": (Wide(widening=2), [PROJECTS]),
    "dilation": (Wide(dilation=2, padding=2), []),
    "wide padding": (Wide(padding=(1, 2)), []),
    "high padding": (Wide(padding=(2, 1)), [PROJECTS]),
    "groups of two": (Wide(groups=20), []),
    "read twice": (Wide(lambda wide, result: result + wide), []),
    "added to what it reads": (Residual(), []),
}


@pytest.mark.parametrize("name", WIDE)
@torch.no_grad()
def test_a_depthwise_convolution_and_its_neighbours_are_one_step(name):
    net, expected = WIDE[name]
    (x,) = images((2, 8, 13, 15))
    graph = fx.GraphModule(net, _Tracer().trace(net.eval()))
    scene = scene_of(graph, (x,))
    joints = {
        layer: scene.joints[layer.node] for layer in scene.layers if layer.node in scene.joints
    }
    pairs = [tuple(part.name for part in one.layers(layer)) for layer, one in joints.items()]
    assert pairs == expected
    apart = chosen(scene)
    for layer, joint in joints.items():
        joined = {**apart, layer.node: Timed(joint, 0.0)}
        programs = [bind(scene, choice) for choice in (apart, joined)]
        torch.testing.assert_close(*(program(x) for program in programs), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(programs[1](x), net(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_next_program_takes_over_what_others_packed_and_lets_go_of_the_rest(monkeypatch):
    pack, made = others._onednn_convolution, []

    def counted(*given):
        run = pack(*given)
        made.append(weakref.ref(run))
        return run

    monkeypatch.setattr(others, "_onednn_convolution", counted)
    net = nn.Sequential(*(nn.Conv2d(8, 8, 3) for _ in range(3))).eval()
    (x,) = images((1, 8, 13, 15))
    scene = scene_of(fx.GraphModule(net, _Tracer().trace(net)), (x,))
    theirs = named(scene, *["onednn"] * 3)
    last = scene.layers[2].node
    fewer = {**theirs, last: chosen(scene)[last]}
    packed, counts = Packed(), []
    for choice in (theirs, fewer, theirs):
        program = None
        program = bind(scene, choice, packed)
        counts.append((len(made), sum(ref() is not None for ref in made)))
        torch.testing.assert_close(program(x), net(x), rtol=1e-4, atol=1e-5)
    assert counts == [(3, 3), (3, 2), (4, 3)]


def sitting(gain):
    """Two layers in turns with one that computes both, and gains so much."""
    joined = 1e-5 - gain
    return {"apart": RivalTime(1e-5, 1e-5, 9), "joined": RivalTime(joined, joined, 9)}


@pytest.mark.parametrize(
    ("gain", "expected"),
    [
        ({EXPANDED: 2e-6, PROJECTED: 1e-6}, ["nhwc pointwise", EXPANDED, "nhwc pointwise"]),
        ({EXPANDED: 1e-6, PROJECTED: 2e-6}, ["nhwc pointwise", "nhwc depthwise", PROJECTED]),
        ({EXPANDED: -1e-6, PROJECTED: 0.0}, ["nhwc pointwise", "nhwc depthwise", "nhwc pointwise"]),
    ],
)
@torch.no_grad()
def test_the_pair_that_gains_most_is_joined(gain, expected, tmp_path, monkeypatch):
    net, (x,) = Wide().eval(), images((2, 8, 13, 15))
    scene = scene_of(fx.GraphModule(net, _Tracer().trace(net)), (x,))
    ledger = Ledger(tmp_path / "plans.json")
    timed = []

    def time(scene, layer, joint, choice):
        timed.append(joint.name)
        return sitting(gain[joint.name])

    monkeypatch.setattr(joining, "_hold", time)
    for _ in range(2):
        assert names(joining.join(scene, chosen(scene), ledger, Leisure()))[-3:] == expected
    assert timed == [EXPANDED, PROJECTED]


@torch.no_grad()
def test_a_plan_times_pairs_and_can_be_made_again(tmp_path, monkeypatch):
    net, (x,) = Wide().eval(), images((2, 8, 13, 15))
    graph = fx.GraphModule(net, _Tracer().trace(net))
    monkeypatch.setattr("nhwc.plan.join", first_pair)
    plan = make_plan(graph, (x,), Ledger(tmp_path / "plans.json"))
    torch.testing.assert_close(plan.program(x), net(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(remake_plan(graph, (x,), plan.kernels)(x), plan.program(x))


def first_pair(scene, choice, ledger, leisure):
    """`join`, which times each pair, and then takes the first, whatever was found."""
    joining.join(scene, choice, ledger, leisure)
    for node, joint in scene.joints.items():
        if choice[node].implementation.ours and choice[joint.before.node].implementation.ours:
            return {**choice, node: replace(choice[node], implementation=joint)}
    return choice


@torch.no_grad()
def test_a_kernel_that_is_not_here_is_never_replaced_silently(tmp_path):
    net, (x,) = Wide().eval(), images((2, 8, 13, 15))
    graph = fx.GraphModule(net, _Tracer().trace(net))
    plan = make_plan(graph, (x,), Ledger(tmp_path / "plans.json"))
    (key, _), *rest = plan.kernels
    for unknown in (
        Identifier("nhwc faster", None, None),
        Identifier("onednn", "contiguous", None),
    ):
        with pytest.raises(UnknownKernel, match=f"has no kernel '{unknown.name}' from .* here"):
            remake_plan(graph, (x,), [(key, unknown), *rest])


@torch.no_grad()
def test_layers_that_torch_must_stand_between_are_no_pair(tmp_path, monkeypatch):
    class Adds(Wide):
        """The pair adds a part of a tuple, which the caller wants as well: torch has to make it."""

        def forward(self, x):
            stem = self.stem(x)
            wide, parts = self.widen(stem), stem.chunk(2, 1)
            return self.narrow(self.depthwise(wide), parts[1]), parts

    net, (x,) = Adds(), images((2, 16, 13, 15))
    net.stem, net.widen = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 40, 1)
    net.narrow = Fused(net.narrow, nn.ReLU())
    scene = scene_of(fx.GraphModule(net, _Tracer().trace(net.eval())), (x,))
    assert {one.name for one in scene.joints.values()} == {EXPANDED, PROJECTED}
    gain = {EXPANDED: 1e-6, PROJECTED: 2e-6}
    monkeypatch.setattr(joining, "_hold", lambda *given: sitting(gain[given[2].name]))
    choice = joining.join(scene, chosen(scene), Ledger(tmp_path / "plans.json"), Leisure())
    assert EXPANDED in names(choice)
    torch.testing.assert_close(bind(scene, choice)(x), net(x), rtol=1e-4, atol=1e-5)


def test_a_program_hands_over_to_torch_and_back():
    (x,) = images((2, 8, 6, 6))
    graph, program, chosen = lowered(Branches(), x)
    assert "torch" in chosen
    assert any(" to " in step.name for step in program.steps)
    ours, theirs = program(x), graph(x)
    torch.testing.assert_close(ours["c"], theirs["c"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours["mean"][0], theirs["mean"][0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours["mean"][1], theirs["mean"][1], rtol=1e-4, atol=1e-5)


def test_kernels_of_ours_run_together_and_in_order():
    graph = fx.symbolic_trace(lambda x: operator.add(x.sin().relu(), x.relu().sin()).relu())
    scene = scene_of(graph, images((1, 8, 4, 4)))
    units = [[layer.name for layer in unit] for unit in stretches(scene.layers, chosen(scene))]
    assert units == [["sin"], ["relu", "relu_1"], ["sin_1"], ["add", "relu_2"]]


@pytest.mark.parametrize(("switch", "expected"), [(0.05, "t"), (0.5, "nhwc b")])
def test_going_between_kernels_of_ours_and_others_has_a_price(switch, expected):
    graph = fx.symbolic_trace(nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=i) for i in (1, 2, 1))))
    scene = scene_of(graph, images((1, 4, 8, 8)))
    ours, torchs = Implementation("nhwc b", NHWC, NHWC, emit=print), Implementation("t", NHWC, NHWC)
    timings = {layer.node: (Timed(ours, 1.0), Timed(torchs, 2.0)) for layer in scene.layers}
    middle = scene.layers[1].node
    timings[middle] = (Timed(ours, 1.2), Timed(torchs, 1.0))
    choice = assign(scene, timings, lambda seen: 0.0, switch)
    assert choice[middle].implementation.name == expected


@torch.no_grad()
def test_exact_plans_have_no_winograd(tmp_path):
    graph = fx.symbolic_trace(nn.Sequential(nn.Conv2d(32, 32, 3, padding=1)))
    x = images((1, 32, 28, 28))
    ledger = Ledger(tmp_path / "memory.json")
    kinds = {
        exact: {
            one.implementation.name
            for timed in make_plan(graph, x, ledger, exact=exact).timings.values()
            for one in timed
        }
        for exact in (False, True)
    }
    assert "nhwc winograd4x4" in kinds[False]
    assert not any("winograd" in kernel for kernel in kinds[True])
    assert "nhwc direct" in kinds[True]


@pytest.mark.parametrize("function", [torch.sqrt, torch.rsqrt, torch.log])
def test_kernels_whose_trial_has_answers_that_are_no_numbers_are_offered(function):
    (x,) = images((2, 8, 5, 5))
    plan = nhwc.optimize(Pointwise(function).eval(), x.abs()).report.plans[0]
    (layer,) = [one for one in plan.layers if function.__name__ in one.what.split()[0]]
    assert any(one.kernel.startswith("nhwc") for one in layer.kernels)


class Pointwise(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer, self.function = nn.Conv2d(8, 8, 1), function

    def forward(self, x):
        return self.function(self.layer(x).abs() + 1)
