"""Norms and gates are a part of the product behind them, sums and activations of what is before."""

import pytest
import torch
import torch.nn.functional as F

from nhwc.kernels import ConvSpec, conv2d_candidates
from nhwc.kernels.layers.activations import Activation
from nhwc.kernels.layers.elementwise import activation_step, add_step, multiply_step
from nhwc.kernels.layers.group_norm import group_norm_steps, pieces_of
from nhwc.kernels.layers.normalize import layer_norm_step, softmax_step
from nhwc.kernels.layers.pooling import global_mean_step
from nhwc.kernels.programs.builder import Builder


def last(*shape):
    return torch.randn(shape).to(memory_format=torch.channels_last)


def kernels_of(program):
    """The names of its kernels, behind those that bring its inputs into channels last."""
    return [step.kernel.name for step in program.schedule.steps[len(program.schedule.inputs) :]]


def product(builder, x, filters=24):
    """A 1x1 convolution, added to `builder`; what it computes, in float64."""
    n, c, h, w = x.shape
    kernel = conv2d_candidates(ConvSpec(n, c, h, w, filters, 1, 1))[0]
    weight, bias = torch.randn(filters, c, 1, 1), torch.randn(filters)
    packed, y = kernel.pack(weight, bias), builder.buffer((n, filters, h, w))
    builder.add(lambda x, y: kernel.steps(x, y, packed), x, y)
    return y, lambda x: F.conv2d(x, weight.double(), bias.double())


def norm(x, weight, bias, eps=1e-3, *, centred=True):
    moved, sizes = x.movedim(1, -1), x.shape[1:2]
    if centred:
        return F.layer_norm(moved, sizes, weight.double(), bias.double(), eps).movedim(-1, 1)
    return (F.rms_norm(moved, sizes, weight.double(), eps) + bias.double()).movedim(-1, 1)


def close(found, wanted):
    """A sum of many products errs by their size, not by its own: it may be next to nothing."""
    limit = 1e-5 * float(wanted.abs().max())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=limit)


@pytest.mark.parametrize("shape", [(2, 3, 5, 1), (1, 20, 9, 7), (3, 40, 6, 6), (2, 130, 11, 5)])
@pytest.mark.parametrize("large", [0.0, 300.0])
@pytest.mark.parametrize(("slot", "centred"), [(0, True), (8, True), (8, False)])
def test_a_product_normalizes_the_pixels_that_it_packs(shape, large, slot, centred):
    n, c, h, w = shape
    weight, bias, builder = torch.randn(c), torch.randn(c), Builder()
    given = builder.input((n, c + slot, h, w))
    x, y = builder.slice(given, slot, c + slot), builder.buffer(shape)
    how = {"eps": 1e-3, "centred": centred}
    builder.add(lambda x, y: layer_norm_step(x, y, weight, bias, **how), x, y)
    out, expected = product(builder, y)
    builder.output(out)
    program = builder.build()
    assert kernels_of(program) == ["direct"]
    image = last(n, c + slot, h, w) + large
    image[0, -1, 0, 0] = torch.inf
    (found,) = program(image)
    wanted = expected(norm(image[:, slot:].double(), weight, bias, centred=centred))
    assert found.isnan().any()
    assert torch.equal(found.isnan(), wanted.isnan())
    there = ~wanted.isnan()
    limit = 1e-5 * (1 + large) * c**0.5
    assert (found.double() - wanted)[there].abs().max() < limit * wanted[there].abs().max()


@pytest.mark.parametrize("shape", [(1, 20, 9, 7), (3, 40, 6, 6), (2, 7, 31, 2)])
@pytest.mark.parametrize("own", [True, False])
def test_a_product_multiplies_the_pixels_that_it_packs_by_the_gate_of_their_image(shape, own):
    n, c, _, _ = shape
    builder = Builder()
    x, y = builder.input(shape), builder.buffer(shape)
    gate = builder.input((n if own else 1, c, 1, 1))
    builder.add(multiply_step, x, gate, y)
    out, expected = product(builder, y)
    builder.output(out)
    program = builder.build()
    assert kernels_of(program) == ["direct"]
    image, factors = last(*shape), torch.randn(n if own else 1, c, 1, 1)
    close(program(image, factors)[0], expected(image.double() * factors.double()))


def test_what_others_read_too_is_written():
    builder, shape = Builder(), (1, 16, 8, 8)
    x, y, mean = builder.input(shape), builder.buffer(shape), builder.buffer((1, 16, 1, 1))
    builder.add(lambda x, y: layer_norm_step(x, y, eps=1e-3), x, y)
    out, expected = product(builder, y)
    builder.add(global_mean_step, y, mean)
    builder.output(out)
    builder.output(mean)
    program = builder.build()
    assert kernels_of(program) == ["layer_norm", "direct", "global_mean"]
    image = last(*shape)
    wanted = norm(image.double(), torch.ones(16), torch.zeros(16))
    found = program(image)
    close(found[0], expected(wanted))
    close(found[1], wanted.mean((2, 3), keepdim=True))


@pytest.mark.parametrize("shape", [(1, 16, 8, 8)])
@pytest.mark.parametrize("case", ["returned", "activated", "shifted", "wide"])
def test_what_a_product_cannot_do_is_a_step(case, shape, threads):
    builder = Builder()
    if case == "wide":
        # Threads share out filters: each would normalize all pixels.
        shape = (1, 512, 2, 2)
        threads(2)
    x, y = builder.input(shape), builder.buffer(shape)
    c = shape[1]
    if case == "shifted":
        shift = torch.ones(c)
        builder.add(lambda x, y: multiply_step(x, x, y, shift=shift), x, y)
        change = lambda x: x * x + 1
    else:
        code = Activation.RELU if case == "activated" else Activation.NONE
        builder.add(lambda x, y: layer_norm_step(x, y, eps=1e-3, activation=code), x, y)
        normal = lambda x: norm(x, torch.ones(c), torch.zeros(c))
        change = lambda x: normal(x).relu() if case == "activated" else normal(x)
    out, expected = product(builder, y, 2048 if case == "wide" else 24)
    builder.output(out)
    if case == "returned":
        builder.output(y)
    program = builder.build()
    assert len(kernels_of(program)) == 2
    image = last(*shape)
    close(program(image)[0], expected(change(image.double())))


def group_normed(builder, x):
    n, c, h, w = x.shape
    pieces, means = builder.buffer((n * pieces_of(c, h * w), 2 * c)), builder.buffer((n, 2 * c))
    y = builder.buffer(x.shape)
    builder.add(lambda *views: group_norm_steps(*views, groups=4), x, pieces, means, y)
    return y


MAKERS = {
    "group norm": (group_normed, lambda x: F.group_norm(x, 4)),
    "layer norm": (
        lambda b, x: one(b, layer_norm_step, x),
        lambda x: norm(x, torch.ones(24), torch.zeros(24), 1e-5),
    ),
    "softmax": (lambda b, x: one(b, softmax_step, x), lambda x: x.softmax(1)),
    "gate": (lambda b, x: one(b, multiply_step, x, x), lambda x: x * x),
    "sum": (lambda b, x: one(b, add_step, x, x), lambda x: x + x),
}


def one(builder, make, *inputs):
    y = builder.buffer(inputs[0].shape)
    builder.add(make, *inputs, y)
    return y


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("end", ["silu", "residual", "residual first", "residual, silu"])
def test_what_computes_also_adds_and_activates(name, end):
    (make, compute), builder, shape = MAKERS[name], Builder(), (2, 24, 9, 5)
    x, other = builder.input(shape), builder.input(shape)
    y = make(builder, x)
    steps = len(builder.build().schedule.steps)
    if end == "silu":
        y = one(builder, lambda x, y: activation_step(x, y, Activation.SILU), y)
    else:
        code = Activation.SILU if "silu" in end else Activation.NONE
        pair = (other, y) if "first" in end else (y, other)
        y = one(builder, lambda x, o, y: add_step(x, o, y, activation=code), *pair)
    builder.output(y)
    program = builder.build()
    # A sum that has a residual already cannot take another.
    full = name == "sum" and end != "silu"
    assert len(program.schedule.steps) == steps + full
    image, more = last(*shape), last(*shape)
    wanted = compute(image.double())
    wanted = wanted + more.double() if "residual" in end else wanted
    close(program(image, more)[0], F.silu(wanted) if "silu" in end else wanted)


def test_a_sum_with_itself_and_a_sum_that_others_read_are_steps():
    builder, shape = Builder(), (1, 8, 4, 4)
    x = builder.input(shape)
    y = one(builder, layer_norm_step, x)
    twice = one(builder, add_step, y, y)
    z = one(builder, softmax_step, twice)
    builder.output(one(builder, add_step, z, x))
    builder.output(one(builder, multiply_step, z, z))
    program = builder.build()
    assert kernels_of(program) == ["layer_norm", "sum", "softmax", "sum", "product"]
    image = last(*shape)
    soft = (2 * norm(image.double(), torch.ones(8), torch.zeros(8), 1e-5)).softmax(1)
    found = program(image)
    close(found[0], soft + image.double())
    close(found[1], soft * soft)
