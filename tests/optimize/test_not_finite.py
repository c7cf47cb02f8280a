"""NaN, infinities and the like through plans: as torch has them, and verified on the machine."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nhwc
from nhwc import kernels
from nhwc.errors import VerificationError
from nhwc.graph.report import PassReport
from nhwc.operators.activations import NamedActivation as Activation
from nhwc.passes import PASSES
from nhwc.plan.others import kernels_for
from nhwc.plan.specs import Convolution, Linear
from nhwc.verify.comparing import lost_nans
from nhwc.verify.inputs import random_inputs, without_numbers

from ..optimizing import force
from ..plan.test_native import OPERATORS, ROWS, images, lowered
from ..special import SPECIAL, assert_same, planted

GELU = Activation("gelu")
ACTIVATIONS = (
    *(None, Activation("relu"), Activation("hardtanh", (0.0, 6.0)), Activation("sigmoid")),
    *(Activation("hardtanh", (-1.0, 1.0)), Activation("tanh"), Activation("hardswish")),
    *(Activation("leaky_relu", (0.1,)), Activation("silu"), GELU),
    *(Activation("gelu_tanh"), Activation("mish"), Activation("quick_gelu")),
    *(Activation("erf_gelu"), Activation("tanh_gelu"), Activation("squared_relu")),
)

CONVOLUTIONS = {
    "plain": ((2, 8, 9, 9), (16, 8, 3, 3), 1, 1, 1),
    "1x1": ((2, 16, 9, 9), (16, 16, 1, 1), 0, 1, 1),
    "grouped": ((2, 16, 9, 9), (16, 8, 3, 3), 1, 1, 2),
    "dilated": ((2, 8, 9, 9), (16, 8, 3, 3), 2, 2, 1),
    "depthwise": ((2, 16, 9, 9), (16, 1, 3, 3), 1, 1, 16),
    "first": ((2, 3, 17, 17), (16, 3, 7, 7), 3, 1, 1),
    "volume": ((2, 8, 4, 6, 6), (16, 8, 3, 3, 3), 1, 1, 1),
    "grouped volume": ((2, 8, 4, 6, 6), (16, 4, 3, 3, 3), 1, 1, 2),
}


def assert_kernels_agree(spec, constants, inputs):
    """All kernels that are not ours give what torch's gives, for inputs with numbers like NaN."""
    eager, *others = (kernel.prepare(*constants) for kernel in kernels_for(spec))
    for value in SPECIAL:
        given = [planted(one, value) for one in inputs]
        expected = eager(*(one.clone() for one in given))
        for run in others:
            found = run(*(one.clone() for one in given))
            assert_same(found, expected, gelu=spec.activation == GELU)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("name", CONVOLUTIONS)
@torch.no_grad()
def test_every_kernel_for_a_convolution_that_is_not_ours(name, residual):
    shape, filters, padding, dilation, groups = CONVOLUTIONS[name]
    rank = len(shape) - 2
    geometry = ((1,) * rank, (padding,) * rank, (dilation,) * rank, groups)
    weight, bias = images(filters)[0], images(filters[:1])[0]
    last = torch.channels_last if rank == 2 else torch.channels_last_3d
    (x,) = (image.contiguous(memory_format=last) for image in images(shape))
    for activation in ACTIVATIONS:
        spec = Convolution(
            shape, filters, *geometry, True, residual, activation, torch.float32, "cpu"
        )
        other = images(spec.output)[0].contiguous(memory_format=last)
        assert_kernels_agree(spec, (weight, bias), (x, other)[: 1 + residual])


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
@torch.no_grad()
def test_every_kernel_for_a_linear_layer_that_is_not_ours(rows, residual):
    x, weight, bias, other = (images(s)[0] for s in ((rows, 32), (24, 32), (24,), (rows, 24)))
    for activation in ACTIVATIONS:
        spec = Linear((rows, 32), (24, 32), True, residual, activation, torch.float32, "cpu")
        assert_kernels_agree(spec, (weight, bias), (x, other)[: 1 + residual])


NORMED = [value for value in SPECIAL if abs(value) != 1e30]
"""The square of 1e30 overflows: torch's norms answer NaN or 0, by the lane of a vector it is in."""


def to_the_power(exponent):
    return lambda x: x**exponent


MORE = {
    "resized one way": lambda x: F.interpolate(x, (7, 12), mode="bilinear"),
    "times infinity": lambda x: x * float("inf"),
    "plus infinity": lambda x: x + float("inf"),
    "over a denormal": lambda x: x / 1e-40,
    "infinity for NaN": lambda x: torch.nan_to_num(x * 2, nan=float("inf")),
    "too much for NaN": lambda x: torch.nan_to_num(x * 2, nan=1e39),
    "too much to divide by": lambda x: F.layer_norm(x, x.shape[-1:], eps=1e80),
    "depthwise": nn.Conv2d(8, 8, 3, padding=1, groups=8),
    "depthwise of 5x5": nn.Conv2d(8, 8, 5, stride=2, padding=2, groups=8),
    "expanded": nn.Sequential(nn.Conv2d(8, 40, 1), nn.Conv2d(40, 40, 3, padding=1, groups=40)),
    "projected": nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Conv2d(8, 24, 1)),
    **{f"to the power of {power}": to_the_power(power) for power in (-2, -1, -0.5, 0.5, 1.5, 3, 4)},
}


@pytest.mark.skipif(not kernels.available(), reason="the kernels are not available")
@pytest.mark.parametrize("name", [*OPERATORS, *MORE])
@torch.no_grad()
def test_our_operators(name):
    (x,) = images((2, 8, 7, 6))
    module = {**OPERATORS, **MORE}[name]
    function = nn.Sequential(module).eval() if isinstance(module, nn.Module) else module
    graph, program, _ = lowered(function, x)
    for value in NORMED if name == "ChannelNorm" else SPECIAL:
        given = planted(x, value)
        expected, found = graph(given.clone()), program(given.clone())
        assert_same(found, expected, gelu=name == "GELU")


RESIZED = {
    (9, 13, 12): ((2, 8, 5, 7, 6), "trilinear"),
    (3, 4, 5): ((2, 8, 5, 7, 6), "trilinear"),
    (9, 7, 6): ((2, 8, 5, 7, 6), "trilinear"),
    (6, 5): ((2, 8, 6, 5), "bilinear"),
    (8, 6): ((2, 8, 6, 5), "bilinear"),
    (24,): ((2, 8, 24), "linear"),
    (40,): ((2, 8, 24), "linear"),
}


@pytest.mark.skipif(not kernels.available(), reason="the kernels are not available")
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("wanted", RESIZED)
@torch.no_grad()
def test_what_is_resized_takes_an_infinity_0_times_where_torch_does(wanted, align):
    shape, mode = RESIZED[wanted]
    (x,) = images(shape)
    graph, program, chosen = lowered(lambda x: F.interpolate(x, wanted, None, mode, align), x)
    assert all(kernel == "nhwc" for kernel in chosen), chosen
    for value in SPECIAL:
        given = planted(x, value).flip(-1)
        assert_same(program(given.clone()), graph(given.clone()))


@pytest.mark.skipif(not kernels.available(), reason="the kernels are not available")
@pytest.mark.parametrize("name", ROWS)
@torch.no_grad()
def test_our_rows(name):
    (x,) = images((2, 7, 24))
    layer = ROWS[name]
    graph, program, _ = lowered(nn.Sequential(layer) if name[0].isupper() else layer, x)
    for value in NORMED if name.startswith("LayerNorm") or name == "block" else SPECIAL:
        given = planted(x, value)
        assert_same(program(given.clone()), graph(given.clone()), gelu="GELU" in name)


class Blocks(nn.Module):
    """Convolutions of all kinds and what stands between them, and an image as the answer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.plain = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU6())
        self.grouped = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=2), nn.Hardtanh())
        self.dilated = nn.Sequential(nn.Conv2d(16, 16, 3, padding=2, dilation=2), nn.ReLU())
        self.depthwise = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Hardswish())
        self.last = nn.Conv2d(16, 8, 1)

    def forward(self, x):
        x = self.plain(self.first(x))
        x = F.relu(self.grouped(x) + x)
        x = F.max_pool2d(self.dilated(x), 3, 1, 1)
        return self.last(self.depthwise(x) + x).relu()


@pytest.mark.parametrize("exact", [False, True])
@torch.no_grad()
def test_a_model_answers_as_the_original_does(exact):
    torch.manual_seed(0)
    model, x = Blocks().eval(), torch.randn(2, 3, 40, 40)
    fast = force(model, x, exact=exact)
    assert fast.report.chosen == "plan"
    nothing = torch.full_like(x, torch.nan)
    assert fast(nothing).isnan().all()
    assert fast(nothing[:1]).isnan().all()
    for value in SPECIAL:
        given = x.clone()
        given[0, 1, 30, 30] = value
        expected, found = model(given), fast(given)
        if exact:
            assert_same(found, expected, 1e-3)
        assert not found[~expected.isfinite()].isfinite().any()
        assert_same(found[1], expected[1], 1e-3)


@torch.no_grad()
def test_a_volume_of_nan_is_none_of_numbers():
    model = nn.Sequential(nn.Conv3d(3, 8, 3), nn.ReLU(), nn.Conv3d(8, 8, 3, groups=2), nn.ReLU6())
    x = torch.randn(1, 3, 8, 12, 12)
    fast = force(model.eval(), x)
    assert fast(torch.full_like(x, torch.nan)).isnan().all()


def clean_of_nans(graph):
    """A pass as wrong as a fused kernel that makes 0 of NaN."""
    [output] = graph.graph.find_nodes(op="output")
    with graph.graph.inserting_before(output):
        output.args = (graph.graph.call_function(torch.nan_to_num, output.args),)
    graph.recompile()
    return PassReport("clean_of_nans")


def test_what_makes_a_number_of_nan_is_refused():
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), torch.randn(2, 3, 8, 8)
    with pytest.raises(VerificationError, match="finite where the model answers NaN"):
        nhwc.optimize(model, x, passes=(*PASSES, clean_of_nans))
    # Also where a verdict is remembered.
    assert nhwc.optimize(model, x).report.verification.passed
    with pytest.raises(VerificationError, match="finite where the model answers NaN"):
        nhwc.optimize(copy.deepcopy(model), x, passes=(*PASSES, clean_of_nans))


class Eigenvalues(nn.Module):
    def forward(self, x):
        return torch.linalg.eigvals(x.relu() @ x).abs()


def test_a_model_that_dies_of_nan_is_not_shown_any():
    model, x = Eigenvalues().eval(), torch.randn(2, 3, 5, 5)
    fast = nhwc.optimize(model, x)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-3)


class Strict(nn.Module):
    """Refuses what is no picture, as code of users' may."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        y = self.conv(x)
        torch._assert_async(y.isfinite().all())
        return y


def test_a_model_that_refuses_nan_is_optimized():
    assert nhwc.optimize(Strict().eval(), torch.randn(1, 3, 8, 8)).report.verification.passed


def test_trials_have_zeros_and_denormal_numbers_and_nan_is_in_the_first_picture():
    x = torch.rand(2, 3, 32, 32) + 1
    _, normal, uniform = (inputs[0] for inputs in random_inputs((x,), 3))
    tiny = (uniform > 0) & (uniform < 1e-38)
    assert (uniform == 0).any()
    assert tiny.any()
    assert tiny.float().mean() < 0.2
    assert normal.std() > 0.9
    (given, count), nan = without_numbers((x, torch.arange(3))), torch.nan
    assert given[0].isnan().all()
    assert torch.equal(given[1], x[1])
    assert torch.equal(count, torch.arange(3))
    before = {"a": torch.tensor([nan, 1.0, nan]), "b": torch.tensor([True]), "c": 3}
    assert not list(lost_nans(before, {**before, "a": torch.tensor([nan, nan, torch.inf])}))
    (check,) = lost_nans(before, {**before, "a": torch.tensor([nan, nan, 0.0])})
    assert check.reason.startswith("1 of 3 numbers")
    eights = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    for dtype in eights:
        table = {"a": torch.tensor([nan, 1.0]).to(dtype)}
        assert not list(lost_nans(table, table))
        assert list(lost_nans(table, {"a": torch.ones(2).to(dtype)}))
