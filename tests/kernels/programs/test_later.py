"""The product before a linear layer asks for its weights: nothing else about it changes."""

import pytest
import torch
import torch.nn.functional as F

from nhwc.kernels import ConvSpec, conv2d_candidates
from nhwc.kernels.convolutions.direct import LATER
from nhwc.kernels.layers import linear, pooling
from nhwc.kernels.programs import later
from nhwc.kernels.programs.builder import Builder


def last(*shape):
    return torch.randn(shape).to(memory_format=torch.channels_last)


def classifier(size, between=1, c=20, k=40, classes=30):
    """1x1 convolution, global means, linear layer; what they compute, and the last weights."""
    spec = ConvSpec(1, c, size, size, k, 1, 1)
    kernel = conv2d_candidates(spec)[0]
    weight, bias = torch.randn(k, c, 1, 1), torch.randn(k)
    matrix, shift = torch.randn(classes, k), torch.randn(classes)
    packed = kernel.pack(weight, bias)
    builder = Builder()
    x, y = builder.input((1, c, size, size)), builder.buffer((1, k, size, size))
    builder.add(lambda x, y: kernel.steps(x, y, packed), x, y)
    for _ in range(between):
        y, before = builder.buffer((1, k, 1, 1)), y
        builder.add(pooling.global_mean_step, before, y)
    out = builder.buffer((1, classes, 1, 1))
    builder.add(lambda x, y: linear.linear_step(x, y, matrix, shift), y, out)
    builder.output(out, (1, classes))

    def expected(x):
        return F.linear(F.conv2d(x, weight, bias).mean((2, 3)), matrix, shift)

    return builder.build(), expected, matrix


def asked_for(program):
    """What each step asks for that can ask, or None."""
    given = [
        dict(zip(step.kernel.fields, step.args, strict=True)) for step in program.schedule.steps
    ]
    return [one[LATER[0]] for one in given if LATER[0] in one]


@pytest.mark.parametrize("size", [1, 5, 7, 15, 40])
@pytest.mark.parametrize("used", [1, 2, 3])
def test_the_weights_are_asked_for_and_the_answer_is_the_same(isa, threads, size, used):
    threads(used)
    program, expected, matrix = classifier(size)
    (found,) = asked_for(program)
    assert found.data_ptr() == matrix.data_ptr()
    x = last(1, 20, size, size)
    torch.testing.assert_close(program(x)[0], expected(x), rtol=1e-4, atol=1e-4)


def test_what_is_too_far_ahead_is_not_asked_for():
    assert asked_for(classifier(5, between=later._NEAR - 1)[0]) != [None]
    assert asked_for(classifier(5, between=later._NEAR)[0]) == [None]


def test_no_more_is_asked_for_than_caches_hold(monkeypatch):
    monkeypatch.setattr(later, "_MOST", 64)
    program, expected, _ = classifier(7)
    product = next(step for step in program.schedule.steps if LATER[0] in step.kernel.fields)
    assert product.args[product.kernel.fields.index(LATER[1])] == 64
    x = last(1, 20, 7, 7)
    torch.testing.assert_close(program(x)[0], expected(x), rtol=1e-4, atol=1e-4)


def test_no_more_is_asked_for_than_comes_while_the_product_is_made():
    program, _, matrix = classifier(3)
    product = next(step for step in program.schedule.steps if LATER[0] in step.kernel.fields)
    assert product.given[LATER[1]] == 3 * 3 * 20 * 40 // later._WORK < matrix.numel()


def test_the_second_of_two_linear_layers_is_not_asked_for():
    first, second = torch.randn(24, 20), torch.randn(30, 24)
    spec = ConvSpec(1, 20, 1, 1, 20, 1, 1)
    kernel = conv2d_candidates(spec)[0]
    packed = kernel.pack(torch.randn(20, 20, 1, 1), None)
    builder = Builder()
    x, y, z, out = builder.input((1, 20)), *(builder.buffer((1, n)) for n in (20, 24, 30))
    builder.add(lambda x, y: kernel.steps(x, y, packed), x, y)
    builder.add(lambda x, y: linear.linear_step(x, y, first), y, z)
    builder.add(lambda x, y: linear.linear_step(x, y, second), z, out)
    builder.output(out, (1, 30))
    (found,) = asked_for(builder.build())
    assert found.data_ptr() == first.data_ptr()
