"""Values that depend on the memory format are told with their operator and its line."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nhwc import audit
from nhwc.render.audit_text import audit_text


class Clip(nn.Module):
    """A convolution of volumes, and what `middle` makes of its result."""

    def __init__(self, middle=lambda x: x.relu()):
        super().__init__()
        self.first, self.last = nn.Conv3d(4, 24, 3, padding=1), nn.Conv3d(24, 4, 1)
        self.norm, self.drop = nn.InstanceNorm3d(24), nn.Dropout3d()
        self.middle = middle

    def forward(self, x):
        return self.last(self.drop(self.norm(self.middle(self.first(x)))))


def decoded(x):
    n, c, t, h, w = x.shape
    return torch.as_strided(x, (n, c, t, h, w), (c * t * h * w, t * h * w, h * w, w, 1)).relu()


def compared(middle, **more):
    torch.manual_seed(0)
    # Of a single small clip torch's convolution makes a contiguous one.
    return audit(Clip(middle), torch.rand(2, 4, 8, 16, 16), compare=True, **more)


@pytest.mark.parametrize("backward", [False, True])
def test_both_formats_agree(backward):
    def middle(x):
        padded = F.pad(x, (0, 0, 0, 0, 2, 0))
        return torch.cat([x[:, :, :1].repeat(1, 1, 2, 1, 1), padded[:, :, 2:]], 2).relu_()

    report = compared(middle, backward=backward)
    agreement = report.agreement
    assert agreement.agrees, agreement
    assert agreement.calls >= 8
    assert "give the same values" in audit_text(report)
    assert report.to_dict()["agreement"]["agrees"]


def test_only_calls_of_the_model_are_counted():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
    report = audit(net, torch.rand(2, 3, 9, 9), compare=True)
    assert report.agreement.calls == len(report.calls) == 3


def test_the_first_operator_that_differs_is_named():
    report = compared(decoded)
    first = report.agreement.first
    assert first.operator == "torch.as_strided"
    assert first.site.source.startswith("return torch.as_strided")
    assert first.error > 0.1
    assert report.agreement.result is not None
    assert "`torch.as_strided` is the first whose values differ" in audit_text(report)


@pytest.mark.parametrize(
    ("plain", "last", "error"),
    [(2.0, 1.0, 0.5), (math.inf, 1.0, math.inf), (1.0, math.inf, math.inf)],
)
def test_code_that_asks_for_strides_shows_in_the_result(plain, last, error):
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(3, 8, 3)

        def forward(self, x):
            y = self.first(x)
            return y * (plain if y.is_contiguous() else last)

    report = audit(Asks(), torch.rand(2, 3, 16, 16), compare=True)
    assert report.agreement.first is None
    assert report.agreement.result.error == pytest.approx(error)
    told = json.loads(json.dumps(report.to_dict(), allow_nan=False))["agreement"]["result"]
    assert told["error"] == (pytest.approx(error) if math.isfinite(error) else None)
    assert "asks for strides" in audit_text(report)


def test_group_norm_is_told_with_its_cause():
    report = compared(lambda x: F.group_norm(x + 3000, 24))
    assert report.agreement.first.operator.endswith("group_norm")
    assert "variance from sums of squares" in audit_text(report)


def test_what_is_drawn_answers_otherwise_by_nature():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout(), nn.ReLU()).train()
    report = audit(model, torch.randn(2, 3, 8, 8), compare=True)
    assert report.agreement.agrees
    assert report.agreement.calls >= 2


class Watched(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        y = self.conv(x)
        y.retain_grad()
        y.register_hook(lambda grad: grad)
        return y.relu()


def test_calls_that_ask_for_gradients_are_made_once():
    report = audit(Watched(), torch.randn(2, 3, 8, 8), backward=True, compare=True)
    assert report.agreement.agrees


@pytest.mark.parametrize(
    "drawn",
    [
        torch.randn_like,
        lambda x: (torch.rand_like(x) > 0.5).float(),
        lambda x: torch.empty_like(x).normal_(),
        lambda x: torch.empty_like(x).bernoulli_(),
    ],
)
def test_numbers_drawn_like_an_image_answer_otherwise_by_nature(drawn):
    assert compared(lambda x: x + drawn(x)).agreement.agrees


def _mapped(net, x):
    return torch.vmap(lambda image: net.conv(image[None])[0])(x)


def _beside_a_shape(net, x):
    shape = torch.empty(x.shape, device="meta").contiguous(memory_format=torch.channels_last)
    return net.conv(x) * (shape + 1).ndim


@pytest.mark.parametrize("computes", [_mapped, _beside_a_shape])
def test_calls_without_numbers_to_compare_are_made_once(computes):
    """`vmap` has no rule for a comparison, and nothing lies behind a shape: both were errors."""
    net = type("Net", (nn.Module,), {"forward": computes})()
    net.conv = nn.Conv2d(3, 4, 3)
    assert audit(net, torch.rand(2, 3, 8, 8), compare=True).agreement.agrees
