"""Numbers of numpy's and of other types derived from Python's: in code, settings and answers."""

import enum

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nhwc
from nhwc.graph import capture
from nhwc.graph.tracing.sized import capture_sized


class Mode(str, enum.Enum):
    SMOOTH = "bilinear"


class Times(enum.IntEnum):
    TWO = 2


class Half(float):
    def __repr__(self):
        return "half"


CALCULATED = {
    "times float64": lambda y: y * np.float64(2.5),
    "float64 times": lambda y: np.float64(2.5) * y,
    "over a root": lambda y: y / np.sqrt(2),
    "a root over": lambda y: np.sqrt(2) / (y + 1),
    "float32 less": lambda y: np.float32(0.3) - y,
    "to a power": lambda y: np.float64(2.0) ** y,
    "compared": lambda y: (y > np.float32(0.5)).to(y.dtype),
    "by name": lambda y: torch.addcmul(y, y, y, value=np.float64(0.5)),
    "clamped": lambda y: y.clamp(np.float64(0.1), np.float32(0.9)),
    "chosen": lambda y: torch.where(y > np.float32(0.5), np.float64(1), y),
    "filled": lambda y: y + y.new_full((np.int64(1), 8, 1, 1), np.float32(0.25)),
    "reshaped": lambda y: y.reshape(y.shape[0], np.int64(4), np.int64(2), -1).sum(np.int64(1)),
    "indexed": lambda y: y[:, np.int64(3)] + y[:, np.int64(1) : np.int64(2)].squeeze(1),
    "padded": lambda y: F.pad(y, (np.int64(1), np.int64(2), 0, 0)),
    "resized": lambda y: F.interpolate(y, size=(np.int64(7), 9), mode=Mode.SMOOTH),
    "counted": lambda y: y * (np.float64(2.5) * y.shape[1]),
    "an enum": lambda y: Times.TWO * y.sum(1),
    "one's own": lambda y: y * Half(0.5),
}


def _assigned(y):
    y = y * 1
    y[:, np.int64(2)] = np.float64(3)
    return y


class Calculating(nn.Module):
    def __init__(self, calculate):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8)
        self.calculate = calculate

    def forward(self, x):
        return self.calculate(self.norm(self.conv(x)).relu())


X = torch.linspace(-1, 1, 2 * 4 * 9 * 11).view(2, 4, 9, 11)


@torch.no_grad()
@pytest.mark.parametrize("calculate", [*CALCULATED.values(), _assigned], ids=[*CALCULATED, "set"])
def test_numbers_in_code(calculate):
    model = Calculating(calculate).eval()
    fused, wanted = nhwc.fuse(model), model(X)
    torch.testing.assert_close(fused(X), wanted)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in fused.modules())
    sized, _ = capture_sized(capture(model).module, [X])
    torch.testing.assert_close(sized(X), wanted)


class Alternating(nn.Module):
    def forward(self, x):
        return (-2) ** x.shape[1] * x, (-1.0) ** x


class Listing(Alternating):
    """Can only be recorded."""

    def forward(self, x):
        return super().forward(torch.stack(list(map(torch.neg, x))))


@pytest.mark.parametrize("kind", [Alternating, Listing])
def test_powers_of_negative_numbers(kind, tmp_path):
    # Torch writes (-2) ** x as `-2 ** x` into the code of a graph.
    model, x = kind().eval(), torch.arange(-2.0, 3).expand(2, 5)
    file = tmp_path / "model.nhwc"
    nhwc.save(nhwc.optimize(model, x), file)
    sized, _ = capture_sized(capture(model).module, [x])
    for made in (nhwc.fuse(model), sized, nhwc.optimize(model, x), nhwc.load(file)):
        for result, wanted in zip(made(x), model(x), strict=True):
            assert torch.equal(result, wanted)


def test_sizes_are_not_counted_in_another_precision_than_the_models():
    class Cropping(nn.Module):
        def forward(self, x):
            return x[:, :, : x.shape[2] * np.float32(0.1) // 1]

    opaque = nhwc.fuse(Cropping()).report.opaque
    assert "it counts in a float32" in opaque[0].reason


@pytest.mark.parametrize("number", [np.float64(3), np.int64(4), Half(0.5), Times.TWO])
def test_numbers_that_are_returned_keep_their_type(number):
    class Returning(nn.Module):
        def forward(self, x):
            return x.relu(), number

    for result in (nhwc.fuse(Returning()), nhwc.optimize(Returning().eval(), X)):
        assert type(result(X)[1]) is type(number)


def test_numbers_that_an_opaque_part_is_given_keep_their_type():
    class Asking(nn.Module):
        def forward(self, x, number):
            if x.sum() > 1e9:
                return x
            return x * number.astype(np.float32).item()

    class Giving(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Asking()

        def forward(self, x):
            return self.part(x, np.float64(2))

    assert torch.equal(nhwc.fuse(Giving())(X), X * 2)


FACTOR = np.float64(0.5)


class Default(nn.Module):
    def forward(self, x, factor=FACTOR, mode=Mode.SMOOTH, times=Times.TWO):
        return F.interpolate(x * factor, scale_factor=times, mode=mode)


def test_defaults_that_no_guard_can_compare_are_not_fixed():
    model = Default().eval()
    for result in (nhwc.fuse(model), nhwc.optimize(model, X)):
        torch.testing.assert_close(result(X), model(X))
        for more in ({"factor": np.float64(2)}, {"mode": "nearest"}, {"times": 3}):
            torch.testing.assert_close(result(X, **more), model(X, **more))


@torch.no_grad()
def test_settings_of_layers(tmp_path):
    one, two, three = np.int64(1), np.int64(2), np.int64(3)
    model = nn.Sequential(
        nn.Conv2d(np.int64(4), np.int64(8), three, stride=one, padding=one, groups=two),
        nn.BatchNorm2d(np.int64(8), eps=np.float64(1e-3)),
        nn.LeakyReLU(np.float64(0.3)),
        nn.MaxPool2d(two, one),
        nn.Upsample(scale_factor=np.float64(2), mode="bilinear"),
        nn.AdaptiveAvgPool2d([three, two]),
        nn.ConvTranspose2d(8, np.int64(4), (three, three), two, one),
        nn.Flatten(one),
        nn.Linear(np.int64(4 * 5 * 3), np.int64(5)),
        nn.Softmax(1),  # Torch 2.15 takes no other integer here.
    ).eval()
    fast = nhwc.optimize(model, X)
    torch.testing.assert_close(fast(X), model(X))
    nhwc.save(fast, tmp_path / "model.nhwc")
    torch.testing.assert_close(nhwc.load(tmp_path / "model.nhwc")(X), model(X))
    assert type(model[3].kernel_size) is np.int64
