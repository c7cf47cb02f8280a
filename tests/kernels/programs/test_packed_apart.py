"""Of few pixels all are packed first, then panels are shared out: the numbers stay the same."""

import pytest
import torch
import torch.nn.functional as F

from nhwc.kernels import ConvSpec, conv2d_candidates
from nhwc.kernels.convolutions import direct
from nhwc.kernels.convolutions.parts import INPUT, PRODUCTS
from nhwc.kernels.layers.normalize import layer_norm_step
from nhwc.kernels.programs.builder import Builder

SPECS = {
    "pointwise": ConvSpec(1, 40, 15, 13, 100, 1, 1),
    "three taps": ConvSpec(2, 24, 11, 9, 72, 3, 3, padding=(1, 1)),
    "odd channels": ConvSpec(1, 21, 14, 14, 75, 3, 3, stride=(2, 2), padding=(1, 1)),
    "taps far apart": ConvSpec(1, 16, 14, 14, 70, 3, 3, padding=(6, 6), dilation=(6, 6)),
    "deep": ConvSpec(1, 464, 9, 9, 72, 3, 3, padding=(1, 1)),
}


@pytest.fixture(autouse=True)
def _all_are_worth_it_and_fit(monkeypatch):
    monkeypatch.setattr(direct, "_WORTH", 0)
    monkeypatch.setattr(direct, "second_level_bytes", lambda: 2 << 20)


def built(spec, *, normal=False):
    """A program of one convolution, maybe behind a norm, and what it computes in float64."""
    kernel = conv2d_candidates(spec)[0]
    weight, bias = torch.randn(kernel.filters), torch.randn(spec.k)
    gains, shift = torch.randn(2, spec.c)
    packed, builder = kernel.pack(weight, bias), Builder()
    shape = (spec.n, spec.c, spec.h, spec.w)
    x = builder.input(shape)
    if normal:
        y = builder.buffer(shape)
        builder.add(lambda x, y: layer_norm_step(x, y, gains, shift, eps=1e-3, centred=True), x, y)
        x = y
    y = builder.buffer((spec.n, spec.k, spec.out_h, spec.out_w))
    builder.add(lambda x, y: kernel.steps(x, y, packed), x, y)
    builder.output(y)

    def expected(x):
        if normal:
            moved = x.double().movedim(1, -1)
            moved = F.layer_norm(moved, (spec.c,), gains.double(), shift.double(), 1e-3)
            x = moved.movedim(-1, 1)
        moves = {"stride": spec.stride, "padding": spec.padding, "dilation": spec.dilation}
        return F.conv2d(x.double(), weight.double(), bias.double(), **moves)

    return builder.build(), expected


def phases(program):
    steps = [step for step in program.schedule.steps if step.kernel is direct.DIRECT]
    return [step.given["phase"] for step in steps]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("used", [2, 3])
@pytest.mark.parametrize("normal", [False, True])
def test_the_answer_is_the_same(isa, threads, name, used, normal):
    threads(used)
    spec = SPECS[name]
    program, expected = built(spec, normal=normal)
    x = torch.randn(spec.n, spec.c, spec.h, spec.w).to(memory_format=torch.channels_last)
    if spec.pixels >= used * isa.rows:
        assert phases(program) == [INPUT, PRODUCTS]
    wanted = expected(x)
    for _ in range(3):
        (found,) = program(x)
        limit = 1e-5 * float(wanted.abs().max())
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=limit)


def test_one_thread_packs_and_multiplies_block_by_block(threads):
    threads(1)
    assert phases(built(SPECS["pointwise"])[0]) == [0]


def test_what_the_caches_do_not_hold_is_packed_block_by_block(threads, monkeypatch):
    threads(2)
    monkeypatch.setattr(direct, "second_level_bytes", lambda: 1 << 14)
    assert phases(built(SPECS["deep"])[0]) == [0]
