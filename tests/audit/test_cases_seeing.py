"""Public reports of formats lost, converted or misread: each must be seen, or come out right."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nhwc
from nhwc import Format, audit, convert_, format_of, to_format
from nhwc.models.vision import import_torchvision

from ..nets import Between, last


def truly_keeps(function, x) -> bool:
    """What torch does here and now, measured without nhwc."""
    y = function(x)
    last_of = {4: torch.channels_last, 5: torch.channels_last_3d}
    return y.is_contiguous(memory_format=last_of[y.ndim])


@pytest.mark.parametrize(
    "operator",
    [
        nn.MaxPool3d(2),
        nn.AvgPool3d(2),
        nn.AdaptiveAvgPool3d(2),
        nn.InstanceNorm3d(8),
        nn.BatchNorm3d(8),
        nn.GroupNorm(2, 8),
        nn.Upsample(scale_factor=2, mode="trilinear"),
    ],
    ids=lambda module: type(module).__name__,
)
def test_three_dimensional_operators(operator):
    """pytorch#59168, #48430, #194616: some convert inside, and nobody could see which."""
    keeps = truly_keeps(operator.eval(), last(2, 8, 4, 8, 8))
    report = audit(nn.Sequential(operator).eval(), last(2, 8, 4, 8, 8))
    assert (not report.lost) is keeps
    if not keeps:
        assert report.counts["loses"] == 1


@pytest.mark.parametrize("name", ["pad", "crop", "resize"])
def test_torchvision_transforms(name):
    """vision#9560: pad drops the format, crop and resize keep it."""
    import_torchvision()
    from torchvision.transforms.v2 import functional as transforms

    arguments = {"pad": [[1, 1]], "crop": [0, 0, 4, 4], "resize": [[4, 4]]}[name]

    class Step(nn.Module):
        def forward(self, x):
            return getattr(transforms, name)(x, *arguments) * 1

    keeps = truly_keeps(Step(), last(2, 3, 8, 8))
    assert (not audit(Step(), last(2, 3, 8, 8)).lost) is keeps


def test_unsqueezing_a_decoded_image():
    """pytorch#68430, #24090: one image, decoded as H, W, C, seen as 1, C, H, W."""
    image = torch.rand(8, 8, 3).permute(2, 0, 1).unsqueeze(0)
    assert format_of(image) is Format.CHANNELS_LAST
    grey = torch.rand(8, 8, 1).permute(2, 0, 1).unsqueeze(0)
    assert format_of(grey) is Format.AMBIGUOUS
    assert to_format(grey, Format.CHANNELS_LAST).stride() == (64, 1, 8, 1)


def test_reshaping_to_one_image():
    """pytorch#78611: reshape of 1 x C x H x W gives strides that look like either."""
    x = last(1, 3, 8, 8).reshape(1, 3, 8, 8)
    assert format_of(x) is Format.CHANNELS_LAST
    assert format_of(torch.rand(3, 64).reshape(1, 3, 64, 1)[:, :1]) is Format.AMBIGUOUS


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(1, 8, 3), (2, 1, 8, 8)),
        (nn.Conv2d(1, 1, 3), (2, 1, 8, 8)),
        (nn.ConvTranspose2d(8, 4, 3, stride=2), (2, 8, 5, 5)),
        (nn.ConvTranspose2d(8, 4, 3, groups=2), (2, 8, 5, 5)),
        (nn.Conv2d(8, 8, 1), (2, 8, 1, 1)),
        (nn.ConvTranspose3d(4, 2, 3), (1, 4, 3, 3, 3)),
    ],
)
def test_values_stay_right_with_converted_weights(layer, shape):
    """pytorch#82060, #99519: channels-last weights gave wrong values with one-channel inputs and in
    transposed convolutions."""
    x = torch.rand(shape)
    want = layer.double()(x.double())
    layer = convert_(layer.float())
    for given in (x, to_format(x, nhwc.formats.CHANNELS_LAST_OF[x.ndim])):
        torch.testing.assert_close(layer(given).double(), want, rtol=1e-4, atol=1e-5)


def test_interpolating_an_unsqueezed_byte_image():
    """pytorch#100258: wrong values for one uint8 image in channels last."""
    image = torch.randint(0, 255, (16, 16, 3), dtype=torch.uint8).permute(2, 0, 1).unsqueeze(0)
    sizes = {"size": (8, 8), "mode": "bilinear", "antialias": True}
    want = F.interpolate(image.contiguous(), **sizes)
    assert torch.equal(F.interpolate(to_format(image, Format.CHANNELS_LAST), **sizes), want)


def test_a_view_that_channels_last_does_not_have():
    """pytorch/examples#836 and many others: "view size is not compatible"."""

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8 * 36, 4)

        def forward(self, x):
            x = self.conv(x)
            return self.head(x.view(x.shape[0], -1))

    with pytest.raises(
        nhwc.ModelFailed, match=r"cases_seeing\.py:\d+: .*write \.reshape or \.flatten"
    ):
        audit(Classifier(), torch.rand(2, 3, 8, 8))


def test_the_one_convolution_that_was_not_converted_is_named():
    """pytorch#126708: "reporting that makes it easy to find the bad conv"."""
    net = convert_(Between(nn.Conv2d(8, 8, 3)))
    convert_(net.operator, Format.CONTIGUOUS)
    (finding,) = audit(net, last(2, 3, 8, 8)).findings
    assert finding.kind == "unconverted"
    assert "(operator)" in finding.remedy


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_group_norm_on_a_gpu():
    """pytorch#111824: GroupNorm on CUDA returned contiguous in older versions."""
    norm = nn.GroupNorm(2, 8).cuda()
    keeps = truly_keeps(norm, last(2, 8, 8, 8).cuda())
    assert (not audit(nn.Sequential(norm), last(2, 8, 8, 8).cuda()).lost) is keeps
