"""The convolution kernels against float64, on every instruction set that this machine has."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nhwc import InputError
from nhwc.formats import Format, format_of
from nhwc.kernels import conv2d
from nhwc.kernels.convolutions.conv import conv2d_candidates
from nhwc.kernels.convolutions.spec import ConvSpec
from nhwc.kernels.convolutions.tiles import FORMS
from nhwc.kernels.language import isa as isas
from nhwc.kernels.layers.activations import Activation
from nhwc.kernels.tape.invoke import Invocation
from nhwc.kernels.tape.steps import View

from ..cases import STEADY, Case, convolutions, frames, in_frames

many = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def run_all(case):
    with torch.inference_mode():
        for kernel in conv2d_candidates(case.spec):
            packed = kernel.pack(case.weight, case.bias)
            yield kernel.name, conv2d(kernel, case.x, packed, case.residual)


@many
@given(spec=convolutions())
def test_any_convolution(isa, spec):
    case = Case(spec)
    for name, y in run_all(case):
        case.check(y, name)


@pytest.mark.parametrize("taps", sorted({form.t.taps for form in FORMS.values()}), ids=str)
@many
@given(data=st.data())
def test_winograd(isa, taps, data):
    spec = data.draw(convolutions(winograd=taps))
    case = Case(spec)
    names = []
    for name, y in run_all(case):
        case.check(y, name)
        names.append(name)
    assert spec.stride != (1, 1) or names[-len(served(spec)) :] == served(spec)


def served(spec):
    """The names of Winograd's kernels for filters of this size that move by one."""
    return [name for name, form in FORMS.items() if form.t.taps == (spec.r, spec.s)]


@pytest.mark.parametrize(("size", "found"), [(3, []), (4, [2]), (5, [3]), (7, [4])])
def test_winograd_of_filters_that_move_by_two(size, found):
    """Its transforms see half of the taps: 3x3 would be 2x2 with many zeros, and saves nothing."""
    spec = ConvSpec(1, 32, 20, 20, 32, size, size, stride=(2, 2))
    forms = [FORMS[kernel.name] for kernel in conv2d_candidates(spec) if kernel.name in FORMS]
    assert sorted({form.t.taps[0] for form in forms}) == found


@pytest.mark.parametrize(
    ("taps", "most"), [((2, 2), 0.8), ((3, 3), 1.5), ((4, 4), 1.2), ((5, 5), 3), ((1, 7), 3.5)]
)
def test_how_much_winograd_errs(isa, taps, most):
    """Beside the direct sum; with 1 and 2 for points, tiles of 4x4 would err 2.2 times as much."""
    case = Case(ConvSpec(1, 64, 24, 24, 64, *taps))
    errors = {name: (y.double() - case.expected()).norm() for name, y in run_all(case)}
    assert max(errors[name] for name in served(case.spec)) < most * errors["direct"]


@pytest.mark.parametrize("stride", [1, 2])
def test_weights_of_any_format(isa, stride):
    case = Case(ConvSpec(1, 32, 12, 12, 40, 5, 5, stride=(stride, stride)))
    for kernel in conv2d_candidates(case.spec):
        last = case.weight.contiguous(memory_format=torch.channels_last)
        assert torch.equal(kernel.pack(last, case.bias), kernel.pack(case.weight, case.bias))


@many
@given(spec=convolutions(deep=True), threads=st.integers(1, 2))
def test_any_volume(isa, spec, threads):
    in_volumes(spec, threads)


@pytest.mark.parametrize("taps", [(3, 3), (5, 5)], ids=str)
@many
@given(data=st.data())
def test_winograd_of_volumes(isa, taps, data):
    spec = data.draw(convolutions(winograd=taps, deep=True))
    assert in_volumes(spec) >= {*(served(spec) if spec.stride == (1, 1) else [])}


def in_volumes(spec, threads=1):
    """The names of the kernels for a volume, each of which computes what float64 does."""
    case, names = Case(spec), set()
    with torch.inference_mode():
        for kernel in conv2d_candidates(spec.folded()):
            packed = kernel.pack(case.weight.reshape(kernel.filters), case.bias)
            x, y = case.x.movedim(1, -1).contiguous(), torch.zeros(case.out_shape)
            beside = None if case.residual is None else case.residual.movedim(1, -1).contiguous()
            in_frames(kernel, packed, x, y, beside, threads=threads)
            case.check(y.movedim(-1, 1), kernel.name)
            names.add(kernel.name)
    return names


@many
@given(data=st.data())
def test_grouped(isa, data):
    pairs = [(4, 4), (8, 8), (3, 16), (16, 32), (32, 16), (24, 24), (5, 8), (8, 40)]
    inputs, outputs = data.draw(st.sampled_from(pairs))
    groups = data.draw(st.sampled_from([4, 8] if outputs == 4 else [3, 4, 8]))
    stride = data.draw(st.sampled_from([1, 2]))
    spec = ConvSpec(
        n=data.draw(st.integers(1, 2)),
        c=inputs * groups,
        h=data.draw(st.integers(1, 9)),
        w=data.draw(st.integers(13, 30)),
        k=outputs * groups,
        r=3,
        s=3,
        stride=(stride, stride),
        padding=(1, 1),
        groups=groups,
        activation=data.draw(st.sampled_from(STEADY)),
        slope=0.1,
        has_residual=data.draw(st.booleans()),
    )
    case = Case(spec)
    names = []
    for name, y in run_all(case):
        case.check(y, name)
        names.append(name)
    filled = min(inputs, outputs) >= isas.host().width
    transformed = served(spec) if filled and stride == 1 else []
    assert names == ["direct", "grouped", *transformed]


FEW_CHANNELS = [(1, 1), (1, 2), (2, 2), (4, 1), (6, 1), (8, 1), (12, 1), (16, 1), (16, 2)]
"""With the stride of a layer that the kernel for first layers computes, too."""


def of_few_channels(data, **more):
    c, stride = data.draw(st.sampled_from([(3, 1), (3, 2), (3, 4), *FEW_CHANNELS]))
    return ConvSpec(
        n=data.draw(st.integers(1, 3)),
        c=c,
        h=data.draw(st.integers(1, 12)),
        w=14 * stride + data.draw(st.integers(0, 40)),
        k=data.draw(st.sampled_from([1, 7, 16, 17, 32, 33, 40, 64, 70])),
        r=data.draw(st.integers(1, 7)),
        s=data.draw(st.integers(1, 7)),
        stride=(data.draw(st.integers(1, 3)), stride),
        padding=(3, data.draw(st.integers(3, 4))),
        activation=data.draw(st.sampled_from(STEADY)),
        slope=0.1,
        has_residual=data.draw(st.booleans()),
        **more,
    )


@many
@given(data=st.data())
def test_stem(isa, data):
    case = Case(of_few_channels(data))
    names = []
    for name, y in run_all(case):
        case.check(y, name)
        names.append(name)
    assert ("stem" in names) is packs(case.spec)


@many
@given(data=st.data(), deep=frames(), threads=st.integers(1, 2))
def test_stem_of_volumes(isa, data, deep, threads):
    spec = of_few_channels(data, frames=deep)
    assert ("stem" in in_volumes(spec, threads)) is packs(spec)


def packs(spec):
    """Whether its windows are more than one pixel, or colours that may lie in planes."""
    return spec.depth > spec.c or spec.c == 3


# Shapes that reach every way of cutting the work: many blocks, few pixels, depth in parts.
LARGE = [
    ConvSpec(1, 64, 30, 30, 96, 1, 1, activation=Activation.RELU),
    ConvSpec(1, 2100, 7, 7, 72, 1, 1, has_residual=True),
    ConvSpec(1, 250, 4, 4, 72, 3, 3, padding=(1, 1), has_residual=True),
    ConvSpec(1, 40, 5, 5, 410, 1, 1, activation=Activation.RELU),
    ConvSpec(2, 128, 14, 14, 64, 3, 3, padding=(1, 1), activation=Activation.SILU),
    ConvSpec(1, 256, 6, 5, 80, 3, 3, padding=(1, 1), has_residual=True),
    ConvSpec(1, 64, 7, 7, 150, 3, 3, padding=(1, 1), has_residual=True),
    ConvSpec(1, 150, 12, 11, 40, 3, 3, padding=(1, 1), activation=Activation.RELU),
    ConvSpec(1, 16, 61, 47, 33, 3, 3, padding=(1, 1), activation=Activation.RELU6),
    ConvSpec(1, 3, 50, 50, 24, 7, 7, stride=(2, 2), padding=(3, 3)),
    ConvSpec(2, 3, 70, 224, 40, 3, 3, padding=(1, 1), activation=Activation.GELU),
    ConvSpec(1, 96, 20, 20, 96, 3, 3, groups=32, padding=(1, 1)),
    ConvSpec(1, 64, 14, 14, 64, 3, 3, groups=16, padding=(1, 1), has_residual=True),
    ConvSpec(1, 96, 7, 7, 96, 3, 3, groups=3, padding=(1, 1), activation=Activation.RELU),
    ConvSpec(1, 192, 14, 9, 192, 3, 3, groups=3, padding=(1, 1), has_residual=True),
    ConvSpec(1, 888, 7, 7, 888, 3, 3, groups=37, padding=(1, 1), activation=Activation.RELU),
    ConvSpec(2, 240, 13, 9, 240, 3, 3, groups=2, padding=(1, 1), activation=Activation.SILU),
]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("spec", LARGE, ids=str)
def test_larger_ones_with_several_threads(isa, threads, spec, count):
    threads(count)
    case = Case(spec)
    for name, y in run_all(case):
        case.check(y, name)


@pytest.mark.parametrize("spec", LARGE, ids=str)
def test_the_number_of_threads_does_not_change_a_bit(threads, spec):
    case, results = Case(spec), []
    for count in (1, 2, 3):
        threads(count)
        results.append(dict(run_all(case)))
    for name in results[0]:
        assert all(torch.equal(results[0][name], other[name]) for other in results)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.contiguous(),
        lambda x: x,
        lambda x: torch.cat((x, x), 1)[:, 24:],
        lambda x: torch.cat((x, x), 1).contiguous(memory_format=torch.channels_last)[:, 24:],
        lambda x: torch.cat((x, x), 3)[:, :, :, ::2],
        lambda x: x.double(),
    ],
    ids=["contiguous", "channels_last", "slice", "channels_last slice", "strided", "double"],
)
def test_input_of_any_layout(make):
    x = torch.randn(2, 24, 10, 8).contiguous(memory_format=torch.channels_last)
    given_x = make(x)
    spec = ConvSpec(*given_x.shape, 40, 3, 3, padding=(1, 1))
    case = Case(spec)
    case.x = given_x.float()
    for name, y in run_all(case):
        case.check(y, name)
        assert format_of(y) is Format.CHANNELS_LAST


@pytest.mark.parametrize("shape", [(2, 1, 6, 6), (3, 20, 1, 1), (1, 1, 1, 1), (1, 5, 4, 1)])
def test_ambiguous_input(shape):
    n, c, h, w = shape
    case = Case(ConvSpec(n, c, h, w, 8, 3, 3, padding=(1, 1)))
    for name, y in run_all(case):
        case.check(y, name)


def test_an_empty_batch():
    case = Case(ConvSpec(0, 8, 6, 6, 16, 3, 3))
    assert [tuple(y.shape) for _, y in run_all(case)] == [(0, 16, 4, 4)] * 4


@given(data=st.data())
@many
def test_writes_into_a_slice_and_nowhere_else(data):
    """What a concatenation needs: input, residual and output are channels of larger images."""
    spec = data.draw(convolutions(winograd=data.draw(st.sampled_from([None, (3, 3), (5, 5)]))))
    case = Case(spec)
    wide = lambda t: F.pad(t.permute(0, 2, 3, 1), (3, 6)).contiguous()
    for kernel in (one for one in conv2d_candidates(spec) if not one.dense):
        x, y = wide(case.x), torch.full((spec.pixels, spec.k + 9), 7.0)
        residual = None if case.residual is None else wide(case.residual)
        shape = (spec.n, spec.k, spec.out_h, spec.out_w)
        steps = kernel.steps(
            View("x", (spec.n, spec.c, spec.h, spec.w), spec.c + 9, 3),
            View("y", shape, spec.k + 9, 3),
            kernel.pack(case.weight, case.bias),
            None if residual is None else View("residual", shape, spec.k + 9, 3),
        )
        Invocation.of(steps, 1)({"x": x, "y": y, "residual": residual})
        inside = y[:, 3:-6].reshape(spec.n, spec.out_h, spec.out_w, spec.k)
        case.check(inside.permute(0, 3, 1, 2), kernel.name)
        assert (y[:, :3] == 7).all()
        assert (y[:, -6:] == 7).all()


@many
@given(data=st.data(), filters=st.integers(1, 8), places=st.integers(1, 20))
def test_few_filters(isa, data, filters, places):
    """Lanes that are summed, of images and of volumes; also where the input is a slice."""
    drawn = data.draw(convolutions(deep=data.draw(st.booleans())))
    spec = replace(drawn, c=drawn.c // drawn.groups, k=filters, groups=1)
    spec = replace(spec, wanted=(drawn.out_h, places))
    found = [one for one in conv2d_candidates(spec) if one.name == "few"]
    for kernel, gap in itertools.product(found, (0, 9)):
        run_dense(kernel, gap)
    width = isas.host().width
    assert bool(found) == (filters <= width // 2 and places >= min(8, width // filters))


@many
@given(data=st.data(), channels=st.sampled_from([1, 2, 4]), places=st.integers(1, 70))
def test_as_few_filters_as_channels(isa, data, channels, places):
    """Lanes that are pixels, of images and of volumes."""
    drawn = data.draw(convolutions(deep=data.draw(st.booleans())))
    spec = replace(drawn, c=channels, k=channels, groups=1, stride=(drawn.stride[0], 1))
    spec = replace(spec, wanted=(drawn.out_h, places))
    found = [one for one in conv2d_candidates(spec) if one.name == "narrow"]
    for kernel in found:
        run_dense(kernel)
    assert bool(found) == (spec.depth > spec.c and places >= isas.host().width // channels)


def run_dense(kernel, gap=0):
    """Run a kernel whose result lies without gaps, on an image that may be a slice."""
    spec = kernel.spec
    case, shape = Case(spec), (spec.n, spec.k, spec.frames.out_d * spec.out_h, spec.out_w)
    x = F.pad(case.x.movedim(1, -1), (gap // 3, gap - gap // 3)).contiguous()
    y, views = torch.full(case.out_shape, 7.0), {"y": View("y", shape, spec.k)}
    if case.residual is not None:
        views["residual"] = View("residual", shape, spec.k)
    sizes = (spec.n, spec.c, spec.frames.d * spec.h, spec.w)
    given_x = View("x", sizes, spec.c + gap, gap // 3)
    packed = kernel.pack(case.weight.reshape(kernel.filters), case.bias)
    steps = kernel.steps(given_x, views["y"], packed, views.get("residual"))
    beside = None if case.residual is None else case.residual.movedim(1, -1).contiguous()
    Invocation.of(steps, 1)({"x": x, "y": y, "residual": beside})
    case.check(y.movedim(-1, 1), kernel.name)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity(isa, value):
    """Direct: where torch has them. Winograd: in the tiles that see them, as its text says."""
    case = Case(ConvSpec(1, 20, 16, 16, 20, 3, 3, padding=(1, 1), activation=Activation.RELU6))
    case.spec = ConvSpec(1, 20, 16, 16, 20, 3, 3, padding=(1, 1))
    case.x[0, 3, 5, 6] = value
    expected = case.expected()
    wrong = ~expected.isfinite()
    for name, y in run_all(case):
        if name == "direct":
            assert torch.equal(y.isnan(), expected.isnan())
            assert torch.equal(y.isinf(), expected.isinf())
        else:
            assert (~y.isfinite())[wrong].all()
        reach = torch.zeros_like(wrong)
        reach[:, :, :8, 4:8] = True
        assert y[~reach].isfinite().all()


def test_relu_lets_nan_through():
    for activation in Activation:
        spec = ConvSpec(1, 4, 5, 5, 4, 1, 1, activation=activation)
        case = Case(spec)
        case.x[0, 0, 2, 2] = float("nan")
        for _, y in run_all(case):
            assert y[0, :, 2, 2].isnan().all()


def test_messages():
    with pytest.raises(InputError, match="9 channels to 16 cannot be cut into 2 groups"):
        ConvSpec(1, 9, 6, 6, 16, 3, 3, groups=2)
    with pytest.raises(InputError, match="padding may be 0, the others not"):
        ConvSpec(1, 8, 6, 6, 16, 3, 3, stride=(0, 1))
    spec = ConvSpec(1, 8, 6, 6, 16, 3, 3)
    kernel = conv2d_candidates(spec)[0]
    with pytest.raises(InputError, match=r"weight is \(16, 8, 1, 1\)"):
        kernel.pack(torch.zeros(16, 8, 1, 1))
    packed = kernel.pack(torch.zeros(16, 8, 3, 3))
    with pytest.raises(InputError, match="packed weights are 8 numbers"):
        conv2d(kernel, torch.zeros(1, 8, 6, 6), packed[:8])
    with pytest.raises(InputError, match=r"residual is \(1, 1, 1, 1\)"):
        conv2d(kernel, torch.zeros(1, 8, 6, 6), packed, torch.zeros(1, 1, 1, 1))
