"""A convolution that pools what it computes, where a pooling alone reads it."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from nhwc.kernels import ConvSpec, conv2d, conv2d_candidates
from nhwc.kernels.convolutions.conv import kernel_for
from nhwc.kernels.layers import elementwise, pooling
from nhwc.kernels.layers.activations import Activation
from nhwc.kernels.programs.builder import Builder

SHAPES = {
    "even": (1, 12, 12, 16),
    "odd": (2, 11, 13, 20),
    "narrow": (1, 3, 2, 8),
    "wide": (1, 7, 31, 33),
    "tall": (2, 30, 17, 40),
}
WINDOW = {"size": (2, 2), "stride": (2, 2)}


def last(*shape):
    return torch.randn(shape).to(memory_format=torch.channels_last)


def program(kernel, packed, *, pool=WINDOW, size=None, keep=False, residual=False):
    """The convolution, and a maximum over windows beside what no step after may touch: `fence`."""
    spec = kernel.spec
    shape = (spec.n, spec.k, spec.out_h, spec.out_w)
    builder = Builder()
    pooled = (spec.n, 1, *(size or (shape[2] // 2, shape[3] // 2)))
    x, y = builder.input((spec.n, spec.c, spec.h, spec.w)), builder.buffer(shape)
    fence, left, right = builder.input(pooled), builder.buffer(pooled), builder.buffer(pooled)
    for side in (left, right):
        builder.add(elementwise.activation_step, fence, side)
    more = [builder.input(shape)] if residual else []
    builder.add(lambda x, y, *more: kernel.steps(x, y, packed, *more), x, y, *more)
    whole = builder.buffer((spec.n, spec.k, *pooled[2:]))
    builder.add(lambda x, y: pooling.maxpool_step(x, y, **pool), y, whole)
    builder.output(builder.cat([left, whole, right]))
    if keep:
        builder.output(y)
    return builder.build()


def pools(program):
    return sum(step.kernel.name == "maxpool" for step in program.schedule.steps)


def kernels(c=5):
    """One of each kind that can pool, for a shape."""
    for shape, activation in itertools.product(SHAPES, ("none", "relu", "gelu")):
        n, h, w, k = SHAPES[shape]
        code = Activation[activation.upper()]
        for channels in (c, 3):
            spec = ConvSpec(n, channels, h, w, k, 3, 3, padding=(1, 1), activation=code)
            for kernel in conv2d_candidates(spec):
                if kernel.name.startswith("winograd") or kernel.name == "stem":
                    yield shape, kernel


@pytest.mark.parametrize("used", [1, 2, 3])
def test_the_same_as_two_steps(isa, threads, used):
    threads(used)
    seen = set()
    for shape, kernel in kernels():
        spec = kernel.spec
        seen.add(kernel.name)
        x = last(spec.n, spec.c, spec.h, spec.w)
        packed = kernel.pack(torch.randn(spec.k, spec.c, 3, 3), torch.randn(spec.k))
        expected = F.max_pool2d(conv2d(kernel, x, packed), 2)
        together = program(kernel, packed)
        fence = last(spec.n, 1, *expected.shape[2:])
        (found,) = together(x, fence)
        assert pools(together) == 0, (shape, kernel)
        assert torch.equal(found, torch.cat([fence, expected, fence], dim=1)), (shape, kernel)
    assert seen == {"winograd4x4", "winograd2x2", "winograd4x4lean", "stem"}


@pytest.mark.parametrize("name", ["winograd4x4", "stem"])
def test_what_is_not_a_number_stays_so(isa, threads, name):
    threads(2)
    kernel = kernel_for(name, ConvSpec(1, 3, 16, 20, 8, 3, 3, padding=(1, 1)))
    packed = kernel.pack(torch.randn(8, 3, 3, 3), None)
    for row, column in itertools.product(range(6, 10), repeat=2):
        x = last(1, 3, 16, 20)
        x[0, :, row, column] = float("nan")
        (found,) = program(kernel, packed)(x, last(1, 1, 8, 10))
        expected = F.max_pool2d(conv2d(kernel, x, packed), 2)
        assert torch.equal(found[:, 1:-1].isnan(), expected.isnan())


NOT = {
    "a result of its own": {"keep": True},
    "a residual": {"residual": True},
    "a larger window": {"pool": {"size": (3, 3), "stride": (2, 2)}, "size": (6, 7)},
    "windows that overlap": {"pool": {"size": (2, 2), "stride": (1, 1)}, "size": (12, 14)},
    "padding": {"pool": {**WINDOW, "padding": (1, 1)}, "size": (7, 8)},
    "windows that are not full": {"size": (7, 8)},
}


@pytest.mark.parametrize("name", ["winograd4x4", "stem"])
@pytest.mark.parametrize("case", NOT)
def test_what_stays_two_steps(threads, name, case):
    threads(2)
    spec = ConvSpec(1, 3, 13, 15, 8, 3, 3, padding=(1, 1), has_residual="residual" in case)
    kernel = kernel_for(name, spec)
    packed = kernel.pack(torch.randn(8, 3, 3, 3), None)
    given = NOT[case]
    apart = program(kernel, packed, **given)
    assert pools(apart) == 1
    x, more = last(1, 3, 13, 15), [last(1, 8, 13, 15)] if "residual" in given else []
    pool = given.get("pool", WINDOW)
    window = (pool["size"], pool["stride"], pool.get("padding", 0))
    whole = conv2d(kernel, x, packed, *more)
    expected = F.max_pool2d(whole, *window, ceil_mode=case == "windows that are not full")
    found = apart(x, last(1, 1, *expected.shape[2:]), *more)
    assert torch.equal(found[0][:, 1:-1], expected)
    if "keep" in given:
        assert torch.equal(found[1], whole)
