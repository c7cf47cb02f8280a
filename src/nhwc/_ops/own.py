"""Our own calls, realistic and unambiguous where torch's samples are not.

Each is data: the operator, its variant, a few words, and how the arguments are made. The same call
is made small, to be checked, and large, to be timed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Maker:
    """Makes tensors of one dtype on one device: small ones to check, `large` ones to time."""

    device: str
    dtype: torch.dtype
    large: bool = False

    @property
    def n(self) -> int:
        return 2

    @property
    def c(self) -> int:
        return 64 if self.large else 20

    @property
    def hw(self) -> tuple[int, int]:
        return (56, 56) if self.large else (9, 11)

    @property
    def x(self) -> Tensor:
        return self(self.n, self.c, *self.hw)

    @property
    def x3(self) -> Tensor:
        """A 5-D volume, small even if `large`, because 3-D operators are slow."""
        return self(2, 32, 8, 28, 28) if self.large else self(2, 20, 4, 5, 7)

    def __call__(self, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(sum(shape))
        if not self.dtype.is_floating_point:
            whole = torch.randint(0, 10, shape, generator=generator)
            return whole.to(self.device, self.dtype)
        values = torch.randn(shape, generator=generator).to(self.device, self.dtype)
        return values.requires_grad_()

    def stats(self, count: int) -> tuple[Tensor, Tensor]:
        mean, var = self(count).detach(), self(count).detach()
        return mean, var * var + 0.5

    def classes(self, *shape: int) -> Tensor:
        return torch.arange(torch.Size(shape).numel(), device=self.device).reshape(shape) % self.c


Build = Callable[[Maker], tuple[tuple[Any, ...], dict[str, Any]]]
F = "nn.functional."


def _conv(out: int, kernel: int, groups: int = 1, **settings: Any) -> Build:
    """Build a convolution to `out` times C channels; `groups` of 0 means depthwise."""

    def build(m: Maker) -> tuple[tuple, dict]:
        count = m.c if groups == 0 else groups
        weight = m(out * m.c, m.c // count, kernel, kernel)
        return (m.x, weight), {"groups": count, **settings}

    return build


def _call(*args: Any, **settings: Any) -> Build:
    return lambda m: ((m.x, *args), settings)


def _call3(*args: Any, **settings: Any) -> Build:
    return lambda m: ((m.x3, *args), settings)


def _norm(volume: bool, training: bool) -> Build:
    def build(m: Maker) -> tuple[tuple, dict]:
        x = m.x3 if volume else m.x
        c = x.shape[1]
        return (x, *m.stats(c), m(c), m(c)), {"training": training}

    return build


def _grid(volume: bool, **settings: Any) -> Build:
    def build(m: Maker) -> tuple[tuple, dict]:
        x = m.x3 if volume else m.x
        grid = m(x.shape[0], *x.shape[2:], x.ndim - 2).detach().clamp(-1, 1)
        return (x, grid), {"align_corners": False, **settings}

    return build


def _segmentation(m: Maker) -> tuple[tuple, dict]:
    return (m.x, m.classes(m.n, *m.hw)), {}


OWN: tuple[tuple[str, str, str, Build], ...] = (
    (F + "conv2d", "", "3x3", _conv(1, 3, padding=1)),
    (F + "conv2d", "", "1x1", _conv(2, 1)),
    (F + "conv2d", "", "3x3, stride 2", _conv(1, 3, stride=2, padding=1)),
    (F + "conv2d", "", "3x3, 4 groups", _conv(1, 3, 4, padding=1)),
    (F + "conv2d", "", "depthwise 3x3", _conv(1, 3, 0, padding=1)),
    (F + "conv2d", "", "7x7 on 3 channels", lambda m: ((m(2, 3, 64, 64), m(16, 3, 7, 7)), {})),
    (F + "conv_transpose2d", "", "2x2, stride 2", _conv(1, 2, stride=2)),
    (F + "conv3d", "", "3x3x3", lambda m: ((m.x3, m(32, m.x3.shape[1], 3, 3, 3)), {"padding": 1})),
    (F + "conv3d", "", "1x1x1", lambda m: ((m.x3, m(32, m.x3.shape[1], 1, 1, 1)), {})),
    (
        F + "conv_transpose3d",
        "",
        "2x2x2, stride 2",
        lambda m: ((m.x3, m(m.x3.shape[1], 16, 2, 2, 2)), {"stride": 2}),
    ),
    (F + "max_pool2d", "", "3x3, stride 2", _call(3, stride=2, padding=1)),
    (F + "avg_pool2d", "", "2x2", _call(2)),
    (F + "adaptive_avg_pool2d", "", "to 7x7", _call(7)),
    (F + "adaptive_max_pool2d", "", "to 7x7", _call(7)),
    (F + "fractional_max_pool2d", "", "2x2, to half", _call(2, output_ratio=0.5)),
    (F + "max_pool3d", "", "2x2x2", _call3(2)),
    (F + "avg_pool3d", "", "2x2x2", _call3(2)),
    (F + "adaptive_avg_pool3d", "", "to 3x3x3", _call3(3)),
    (F + "adaptive_max_pool3d", "", "to 3x3x3", _call3(3)),
    (F + "lp_pool2d", "", "2x2", _call(2.0, 2)),
    (F + "batch_norm", "", "training", _norm(False, True)),
    (F + "batch_norm", "", "inference", _norm(False, False)),
    (F + "batch_norm", "", "3-D, inference", _norm(True, False)),
    (F + "instance_norm", "", "4-D", _call()),
    (F + "instance_norm", "", "5-D", _call3()),
    (F + "group_norm", "", "4 groups", _call(4)),
    (F + "group_norm", "", "5-D, 4 groups", _call3(4)),
    (F + "layer_norm", "", "over C, H, W", lambda m: ((m.x, m.x.shape[1:]), {})),
    (F + "local_response_norm", "", "5", _call(5)),
    (F + "interpolate", "nearest", "twice as large", _call(scale_factor=2)),
    (
        F + "interpolate",
        "bilinear",
        "twice as large",
        _call(scale_factor=2, mode="bilinear", align_corners=False),
    ),
    (
        F + "interpolate",
        "bicubic",
        "twice as large",
        _call(scale_factor=2, mode="bicubic", align_corners=False),
    ),
    (
        F + "interpolate",
        "trilinear",
        "twice as large",
        _call3(scale_factor=2, mode="trilinear", align_corners=False),
    ),
    (F + "pad", "constant", "1 on each side", _call((1, 1, 1, 1))),
    (F + "pad", "constant", "5-D, 1 on each side", _call3((1, 1, 1, 1, 1, 1))),
    (F + "pad", "reflect", "1 on each side", _call((1, 1, 1, 1), mode="reflect")),
    (F + "pad", "replicate", "1 on each side", _call((1, 1, 1, 1), mode="replicate")),
    (F + "pad", "circular", "1 on each side", _call((1, 1, 1, 1), mode="circular")),
    (F + "grid_sample", "", "bilinear", _grid(False)),
    (F + "grid_sample", "", "nearest", _grid(False, mode="nearest")),
    (F + "grid_sample", "", "5-D", _grid(True)),
    (F + "pixel_shuffle", "", "2", _call(2)),
    (F + "pixel_unshuffle", "", "2", lambda m: ((m(m.n, m.c, 10, 12), 2), {})),
    (F + "channel_shuffle", "", "4 groups", _call(4)),
    (F + "prelu", "", "one weight per channel", lambda m: ((m.x, m(m.c)), {})),
    (F + "softmax", "", "over channels", _call(dim=1)),
    (F + "log_softmax", "", "over channels", _call(dim=1)),
    (F + "normalize", "", "over channels", _call(dim=1)),
    (F + "cross_entropy", "", "a class per pixel", _segmentation),
    (F + "dropout2d", "", "training", _call(p=0.3)),
    (F + "unfold", "", "3x3", _call(3)),
    ("cat", "", "along channels", lambda m: (((m.x, m.x * 2), 1), {})),
    ("cat", "", "along the batch", lambda m: (((m.x, m.x * 2), 0), {})),
    ("stack", "", "five dimensions of four", lambda m: (((m.x, m.x * 2), 1), {})),
    ("mean", "", "over H, W", _call((2, 3), keepdim=True)),
    ("sum", "", "over N, H, W", _call((0, 2, 3))),
    ("roll", "", "along W", _call(1, 3)),
    ("flip", "", "along W", _call((3,))),
    ("repeat", "", "twice along W", _call((1, 1, 1, 2))),
    ("reshape", "", "to a vector per image", lambda m: ((m.x, (m.n, -1)), {})),
    ("flatten", "", "to a vector per image", _call(1)),
    ("index_select", "", "channels", lambda m: ((m.x, 1, m.classes(5)), {})),
    ("permute", "", "to N, H, W, C", _call((0, 2, 3, 1))),
    ("transpose", "", "H and W", _call(2, 3)),
    ("to", "", "to float64", _call(torch.float64)),
    ("expand", "", "to as many images", lambda m: ((m.x, (m.n, m.c, *m.hw)), {})),
    ("masked_fill", "", "half of it", lambda m: ((m.x, m.x > 0, 0), {})),
    ("Tensor.copy_", "", "", lambda m: ((m.x, m.x * 2), {})),
    ("Tensor.zero_", "", "", _call()),
    ("Tensor.detach", "", "", _call()),
    ("Tensor.type", "", "to float64", _call(torch.float64)),
    ("Tensor.chunk", "", "in two channel slices", _call(2, 1)),
)
"""Operator, variant, label, arguments. Operators have the names of torch's database, or
`Tensor.NAME` where it lacks them."""
