"""Convolutions that see nothing but padding: oneDNN's kernels for channels last die of them."""

import pytest
import torch
from torch import nn

import nhwc
from nhwc._audit.deadly import NoDeath
from nhwc.errors import ModelFailed
from nhwc.operators.unseen import sees_no_column

GEOMETRY = {"stride": 2, "padding": (0, 1, 1), "dilation": (1, 3, 3)}


def volumes():
    return nn.Conv3d(2, 24, 1, **GEOMETRY).eval(), torch.randn(2, 2, 2, 6, 1)


def images():
    flat = {"stride": 2, "padding": (0, 1), "dilation": (1, 3)}
    return nn.Conv2d(2, 24, 1, **flat).eval(), torch.randn(4, 2, 6, 1)


@pytest.mark.parametrize(
    ("width", "size", "window", "none"),
    [
        (1, 1, {"stride": 2, "padding": 1}, True),
        (1, 1, {"stride": 2, "padding": 2}, False),
        (2, 1, {"stride": 4, "padding": 2}, True),
        (2, 1, {"stride": 3, "padding": 1}, True),
        (1, 2, {"padding": 2, "dilation": 4}, True),
        (3, 3, {"padding": 1}, False),
        (1, 1, {"padding": 1}, False),
        (2, 3, {}, False),
        (1, 3, {"padding": 1, "dilation": 2, "stride": 2}, False),
    ],
)
def test_whether_a_column_is_seen(width, size, window, none):
    assert sees_no_column(width, size, **window) is none


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("made", [volumes, images])
def test_an_audit_refuses_what_it_would_not_survive(made):
    model, x = made()
    with pytest.raises(ModelFailed, match="all of its taps in the padding"):
        nhwc.audit(model, x)
    assert nhwc.audit(model, x, convert=False).clean
    exported = torch.export.export(model, (x,))
    scripts = torch.jit.script(model), torch.jit.trace(model, x)
    for other in (exported, exported.run_decompositions(), *scripts):
        with pytest.raises(ModelFailed, match="all of its taps in the padding"):
            nhwc.audit(other, x)
    with torch.inference_mode(), pytest.raises(ModelFailed, match="all of its taps"):
        nhwc.audit(model, x)


def test_an_image_too_small_for_the_kernel_is_said_in_torchs_words():
    model = nn.Conv2d(3, 4, 5).eval()
    with pytest.raises(ModelFailed, match="Kernel size can't be greater than actual input size"):
        nhwc.audit(model, torch.rand(1, 3, 9, 4))


def test_a_transposed_convolution_sees_no_padding():
    model, x = nn.ConvTranspose2d(2, 24, 1, stride=2, padding=(0, 1)).eval(), torch.rand(4, 2, 6, 2)
    assert nhwc.audit(model, x).calls


def test_weights_of_one_pixel_say_channels_last_by_strides_that_nothing_needs():
    """Behind a contiguous input, too: torch looks at the strides of dimensions of size 1."""
    flat = {"stride": 2, "padding": (0, 1), "dilation": (1, 3)}

    class Reshaped(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 6, 1, **flat)

        def forward(self, x):
            return self.last(self.first(x).contiguous())

    model, x = Reshaped().eval(), torch.randn(2, 3, 18, 1)
    with pytest.raises(ModelFailed, match="all of its taps in the padding"):
        nhwc.audit(model, x)


def test_an_image_without_a_batch_is_looked_at_as_torch_does():
    flat = {"stride": 2, "padding": (0, 1), "dilation": (1, 3)}
    model, x = nn.Conv2d(2, 24, 1, **flat).eval(), torch.randn(6, 1, 2).permute(2, 0, 1)
    with NoDeath():
        assert model(x).shape == (24, 3, 2)
        model.to(memory_format=torch.channels_last)
        with pytest.raises(ModelFailed, match="all of its taps in the padding"):
            model(x)


def test_an_audit_in_channels_last_that_torch_survives():
    flat = {"stride": 2, "padding": (0, 1), "dilation": (1, 3), "bias": False}
    assert nhwc.audit(nn.Conv2d(2, 24, 1, **flat), torch.randn(4, 2, 6, 1)).converted


@pytest.mark.parametrize("made", [volumes, images])
def test_an_optimized_model_survives(made):
    model, x = made()
    before = {3: nn.Conv3d, 2: nn.Conv2d}[x.dim() - 2](2, 2, 1)
    for net in (model, nn.Sequential(before, model, nn.ReLU()).eval()):
        fast = nhwc.optimize(net, x)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), net(x))
