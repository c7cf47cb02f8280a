"""An expansion and its depthwise convolution as one step: the same bits as in two steps."""

import pytest
import torch

from nhwc import InputError
from nhwc.kernels import ConvSpec, conv2d_candidates
from nhwc.kernels.convolutions import expanded
from nhwc.kernels.convolutions.depthwise import depthwise_step
from nhwc.kernels.convolutions.expanded import Expansion, Window, expanded_depthwise_step
from nhwc.kernels.layers.activations import Activation
from nhwc.kernels.tape.invoke import Invocation
from nhwc.kernels.tape.steps import View


def last(*shape):
    return torch.randn(shape).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("scratch", [1 << 12, 1 << 16, 1 << 20])
@pytest.mark.parametrize(("batch", "stride", "used"), [(1, 1, 1), (1, 2, 2), (3, 2, 4), (2, 1, 3)])
def test_bands_and_threads_change_no_bit(isa, threads, monkeypatch, scratch, batch, stride, used):
    monkeypatch.setattr(expanded, "_SCRATCH_BYTES", scratch)
    threads(used)
    depth, c, h, w = 20, 70, 23, 18
    wide = (batch, c, h, w)
    narrow = (batch, c, (h - 1) // stride + 1, (w - 1) // stride + 1)
    x, weight, bias = last(batch, depth, h, w), torch.randn(c, depth, 1, 1), torch.randn(c)
    filters, shift = torch.randn(c, 1, 3, 3), torch.randn(c)
    views = {"x": x.shape, "wide": wide, "y": narrow}
    views = {name: View(name, tuple(shape), shape[1]) for name, shape in views.items()}
    window = Window((3, 3), (stride, stride), (1, 1))
    settings = {"activation": Activation.SILU}
    one = expanded_depthwise_step(
        *(views["x"], views["y"], Expansion(weight, bias, Activation.HARDSWISH), filters, shift),
        window=window,
        **settings,
    )
    spec = ConvSpec(batch, depth, h, w, c, 1, 1, activation=Activation.HARDSWISH)
    kernel = conv2d_candidates(spec)[0]
    two = [
        *kernel.steps(views["x"], views["wide"], kernel.pack(weight, bias)),
        depthwise_step(
            *(views["wide"], views["y"], filters, shift),
            stride=(stride, stride),
            padding=(1, 1),
            **settings,
        ),
    ]
    results = []
    for steps in ([one], two):
        buffers = {"x": x, "wide": last(*wide), "y": last(*narrow)}
        Invocation.of(steps, used)(buffers)
        results.append(buffers["y"])
    assert torch.equal(*results)


def test_what_it_cannot_do_it_refuses():
    x, y = View("x", (1, 8, 9, 9), 8), View("y", (1, 16, 5, 5), 16)
    expansion, filters = Expansion(torch.randn(16, 8, 1, 1), None), torch.randn(16, 1, 3, 3)
    with pytest.raises(InputError, match="no step expands 8 channels"):
        expanded_depthwise_step(x, y, expansion, filters, window=Window((3, 3), dilation=(2, 2)))
