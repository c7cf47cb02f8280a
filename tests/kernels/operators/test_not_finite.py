"""Kernels given NaN, infinities, 1e30, denormal numbers and -0.0: they stay where torch has them.

Winograd's alone spread them, over their tile, and never make a number of NaN or infinity.
"""

import pytest
import torch
import torch.nn.functional as F

from nhwc.kernels.convolutions.conv import conv2d_candidates
from nhwc.kernels.convolutions.spec import ConvSpec
from nhwc.kernels.layers.activations import Activation
from nhwc.kernels.operators.conv2d import conv2d

from ...special import SPECIAL, assert_same, planted
from ..cases import ACTIVATIONS

SPECS = {
    "3x3": {"c": 24, "k": 33, "r": 3, "s": 3, "padding": (1, 1)},
    "3x3 of few channels": {"c": 5, "k": 7, "r": 3, "s": 3, "padding": (1, 1), "stride": (2, 2)},
    "1x1": {"c": 24, "k": 33, "r": 1, "s": 1},
    "dilated": {"c": 16, "k": 16, "r": 3, "s": 3, "padding": (2, 2), "dilation": (2, 2)},
    "a first layer": {"c": 3, "k": 32, "r": 7, "s": 7, "padding": (3, 3), "stride": (2, 2)},
    "grouped": {"c": 32, "k": 32, "r": 3, "s": 3, "padding": (1, 1), "groups": 8},
    "grouped by 2": {
        "c": 32, "k": 32, "r": 3, "s": 3, "padding": (1, 1), "groups": 8, "stride": (2, 2)
    },
    "few filters": {"c": 8, "k": 2, "r": 3, "s": 9, "padding": (1, 4), "stride": (2, 1)},
    "as few filters as channels": {"c": 2, "k": 2, "r": 3, "s": 3, "padding": (1, 1)},
    "wide groups": {"c": 64, "k": 64, "r": 3, "s": 3, "padding": (1, 1), "groups": 4},
}  # fmt: skip


@pytest.mark.parametrize(
    "activation", [Activation.NONE, Activation.RELU, Activation.RELU6, Activation.SILU]
)
@pytest.mark.parametrize("name", SPECS)
def test_convolutions(isa, name, activation):
    for residual in (False, True):
        spec = ConvSpec(
            n=2, h=13, w=20, **SPECS[name], activation=activation, has_residual=residual
        )
        make = torch.Generator().manual_seed(0)
        weight = torch.randn(spec.k, spec.c // spec.groups, spec.r, spec.s, generator=make) / 4
        x = torch.randn(spec.n, spec.c, spec.h, spec.w, generator=make)
        other = torch.randn(spec.n, spec.k, spec.out_h, spec.out_w, generator=make)
        kernels = [(kernel, kernel.pack(weight, None)) for kernel in conv2d_candidates(spec)]
        for value in SPECIAL:
            given, added = planted(x, value), planted(other, value) if residual else None
            geometry = (spec.stride, spec.padding, spec.dilation, spec.groups)
            total = F.conv2d(given, weight, None, *geometry)
            expected = ACTIVATIONS[activation](total if added is None else total + added)
            for kernel, packed in kernels:
                found = conv2d(kernel, given, packed, added)
                if kernel.exact:
                    assert_same(found, expected)
                else:
                    assert not found[~expected.isfinite()].isfinite().any()
                    # The other image has no part in it.
                    assert_same(found[1], expected[1])


def test_winograd_spreads_no_further_than_its_tile():
    spec = ConvSpec(n=1, c=16, h=16, w=16, k=16, r=3, s=3, padding=(1, 1))
    x, weight = torch.randn(1, 16, 16, 16), torch.randn(16, 16, 3, 3)
    x[0, 3, 5, 5] = torch.nan
    touched = torch.zeros(16, 16, dtype=torch.bool)
    touched[4:8, 4:8] = True
    for kernel in conv2d_candidates(spec):
        lost = conv2d(kernel, x, kernel.pack(weight)).isnan().any(1)[0]
        assert not lost[~touched].any()
        assert lost[4:7, 4:7].all()
        assert int(lost.sum()) == 9 or not kernel.exact


def test_a_picture_of_nan_is_one_behind_every_kernel(isa):
    for name, sizes in SPECS.items():
        for activation in Activation:
            spec = ConvSpec(n=1, h=13, w=20, **sizes, activation=activation)
            x = torch.full((1, spec.c, spec.h, spec.w), torch.nan)
            weight = torch.randn(spec.k, spec.c // spec.groups, spec.r, spec.s)
            for kernel in conv2d_candidates(spec):
                assert conv2d(kernel, x, kernel.pack(weight)).isnan().all(), (
                    name,
                    kernel.name,
                    activation,
                )
