"""Convolutions for tests: random specifications, tensors for them, and the truth in float64."""

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from nhwc.kernels.convolutions.spec import IMAGE, ConvSpec, Frames
from nhwc.kernels.convolutions.tiles import FORMS
from nhwc.kernels.layers.activations import Activation
from nhwc.kernels.tape.invoke import Invocation
from nhwc.kernels.tape.steps import View
from nhwc.operators.spelled import QuickGELU, SquaredReLU

EPS = 2.0**-24
SLACK = {
    "pointwise": 2.5,
    "direct": 2.5,
    "stem": 2.5,
    "grouped": 2.5,
    "few": 2.5,
    "narrow": 2.5,
} | {
    name: {4: 6, 6: 25, 8: 60, 10: 80}[max(form.t.down.size, form.t.across.size)]
    for name, form in FORMS.items()
}
"""How far a result may be off, in units of rounding of the sum of the products' sizes.

Winograd's the more, the more points there are.
"""

ACTIVATIONS = {
    Activation.NONE: lambda v: v,
    Activation.RELU: F.relu,
    Activation.RELU6: F.relu6,
    Activation.AT_LEAST: lambda v: v.clamp(min=0.1),
    Activation.LEAKY_RELU: lambda v: F.leaky_relu(v, 0.1),
    Activation.HARDSWISH: F.hardswish,
    Activation.HARDSIGMOID: F.hardsigmoid,
    Activation.SIGMOID: F.sigmoid,
    Activation.SILU: F.silu,
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda v: F.gelu(v, approximate="tanh"),
    Activation.TANH: torch.tanh,
    Activation.MISH: F.mish,
    Activation.ELU: F.elu,
    Activation.SELU: F.selu,
    Activation.SOFTPLUS: F.softplus,
    Activation.QUICK_GELU: QuickGELU(),
    Activation.SQUARED_RELU: SquaredReLU(),
}
STEADY = [one for one in Activation if one is not Activation.SQUARED_RELU]
"""Those that make no error much larger: a square does, as often as its number is large."""

channels = st.sampled_from([1, 2, 3, 4, 8, 15, 16, 17, 24, 31, 32, 33, 40, 48, 64, 70])
vectors = st.sampled_from([16, 17, 24, 32, 40, 63])
pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))


@st.composite
def frames(draw):
    """The third side of a small volume, and what filters do along it."""
    t, dilation = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (3, 1), (3, 2)]))
    padding = draw(st.integers(0, 2))
    least = max(1, dilation * (t - 1) + 1 - 2 * padding)
    held, wanted = draw(st.booleans()), draw(st.sampled_from([None, None, 1, 4]))
    d, stride = least + draw(st.integers(0, 4)), draw(st.integers(1, 2))
    return Frames(d, t, stride, padding, dilation, wanted, held)


@st.composite
def convolutions(draw, winograd=None, deep=False):
    """Any convolution that torch accepts, small; filters of `winograd` have such a kernel."""
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    of_a_group = vectors if winograd and groups > 1 else channels
    r, s = winograd or draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
    dilation = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 3), (5, 2)]))
    padding = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    smallest = [
        max(1, d * (t - 1) + 1 - 2 * p) for d, t, p in zip(dilation, (r, s), padding, strict=True)
    ]
    return ConvSpec(
        n=draw(st.integers(1, 3)),
        c=groups * draw(of_a_group),
        h=smallest[0] + draw(st.integers(0, 12)),
        w=smallest[1] + draw(st.integers(0, 12)),
        k=groups * draw(of_a_group),
        r=r,
        s=s,
        stride=draw(st.sampled_from([(1, 1), (1, 1), (2, 2), (2, 1)]) if winograd else pairs),
        padding=padding,
        dilation=dilation,
        groups=groups,
        activation=draw(st.sampled_from(STEADY)),
        slope=0.1,
        has_residual=draw(st.booleans()),
        has_bias=draw(st.booleans()),
        frames=draw(frames()) if deep else IMAGE,
        wanted=draw(st.sampled_from([None, None, (3, 7), (9, 13)])) if deep else None,
    )


def in_frames(kernel, packed, x, y, residual=None, *, threads=1, change=lambda step: step):
    """Run a kernel on images or volumes whose channels are last in `x`, `y` and `residual`."""
    spec, deep = kernel.spec, kernel.spec.frames
    shape = (spec.n, spec.k, deep.out_d * spec.out_h, spec.out_w)
    views = [View("x", (spec.n, spec.c, deep.d * spec.h, spec.w), spec.c), View("y", shape, spec.k)]
    beside = None if residual is None else View("residual", shape, spec.k)
    buffers = {"x": x, "y": y} | ({} if residual is None else {"residual": residual})
    steps = [change(step) for step in kernel.steps(*views, packed, beside)]
    Invocation.of(steps, threads)(buffers)


class Case:
    """Random tensors for a specification; the same seed gives the same ones."""

    def __init__(self, spec, seed=0):
        self.spec = spec
        make = torch.Generator().manual_seed(seed)
        depth = spec.depth

        def normal(*shape):
            return torch.randn(shape, generator=make)

        deep = () if spec.frames == IMAGE else (spec.frames.d,)
        deep_out = deep and (spec.frames.out_d,)
        taps = deep and (spec.frames.t,)
        self.x = normal(spec.n, *deep, spec.h, spec.w, spec.c).movedim(-1, 1)
        self.weight = normal(spec.k, spec.c // spec.groups, *taps, spec.r, spec.s) / depth**0.5
        self.bias = normal(spec.k) if spec.has_bias else None
        self.out_shape = (spec.n, *deep_out, spec.out_h, spec.out_w, spec.k)
        self.residual = normal(*self.out_shape).movedim(-1, 1) if spec.has_residual else None

    def _sum(self, change):
        spec, weight = self.spec, change(self.weight.double())
        bias = None if self.bias is None else change(self.bias.double())
        x = change(self.x.double())
        deep = spec.frames
        if spec.wanted is not None or deep.wanted is not None or deep.held:
            y = self._as_wanted(x, weight, bias)
        elif deep == IMAGE:
            y = F.conv2d(x, weight, bias, spec.stride, spec.padding, spec.dilation, spec.groups)
        else:
            stride, padding = (deep.stride, *spec.stride), (deep.padding, *spec.padding)
            dilation = (deep.dilation, *spec.dilation)
            y = F.conv3d(x, weight, bias, stride, padding, dilation, spec.groups)
        return y if self.residual is None else y + change(self.residual.double())

    def _as_wanted(self, x, weight, bias):
        """The convolution where the padding behind is what the size of the result asks for."""
        spec, deep = self.spec, self.spec.frames
        sides = [
            (deep.t, deep.d, deep.out_d, deep.stride, deep.padding, deep.dilation),
            (spec.r, spec.h, spec.out_h, spec.stride[0], spec.padding[0], spec.dilation[0]),
            (spec.s, spec.w, spec.out_w, spec.stride[1], spec.padding[1], spec.dilation[1]),
        ][deep == IMAGE :]
        for dim, (taps, size, out, stride, front, dilation) in enumerate(sides, 2):
            places = torch.arange((out - 1) * stride + dilation * (taps - 1) + 1) - front
            outside = (places < 0) | (places >= size)
            x = x.index_select(dim, places.clamp(0, size - 1))
            if not (deep.held and dim == 2):
                x = x.index_fill(dim, outside.nonzero().flatten(), 0.0)
        stride, dilation = [side[3] for side in sides], [side[5] for side in sides]
        convolve = F.conv2d if deep == IMAGE else F.conv3d
        return convolve(x, weight, bias, stride, 0, dilation, spec.groups)

    def expected(self):
        return ACTIVATIONS[self.spec.activation](self._sum(lambda t: t))

    def check(self, y, name):
        """Assert that `y` is what float64 gives, but for rounding."""
        expected = self.expected()
        sizes = self._sum(torch.abs)
        if name.startswith("winograd") and sizes.numel():
            # An output is a difference of sums over its whole tile, and rounds with the largest.
            h, w = self.spec.dilation
            images = F.pad(sizes.flatten(0, -4), (4 * w, 4 * w, 4 * h, 4 * h))
            sizes = F.max_pool2d(images, 9, 1, 0, (h, w)).view(sizes.shape)
        allowed = EPS * (SLACK[name] * self.spec.depth**0.5 * sizes + 16 * expected.abs() + 4)
        assert y.shape == expected.shape
        excess = ((y.double() - expected).abs() / allowed).max() if y.numel() else 0
        assert excess < 1, f"{name} is off by {excess:.2f} times what is allowed: {self.spec}"
