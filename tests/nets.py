"""Tiny networks that carry what the audit must find in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def last(*shape: int) -> Tensor:
    """A random channels-last tensor."""
    format = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    return torch.rand(shape).to(memory_format=format)


class Between(nn.Module):
    """An operator between two convolutions, so that what it loses is paid for."""

    def __init__(self, operator, channels: int = 8, out: int | None = None, dims: int = 2):
        super().__init__()
        conv = nn.Conv2d if dims == 2 else nn.Conv3d
        self.before = conv(3, channels, 3, padding=1)
        self.operator = operator
        self.after = conv(out or channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.operator(self.before(x)))


def grid_sample(x: Tensor) -> Tensor:
    n, _, h, w = x.shape
    return F.grid_sample(x, torch.zeros(n, h, w, 2), align_corners=False)


def cat_slice_first(x: Tensor) -> Tensor:
    return torch.cat((torch.rand(2, 16, 8, 8)[:, :8], x), dim=1)


def cat_slice_last(x: Tensor) -> Tensor:
    return torch.cat((x, torch.rand(2, 16, 8, 8)[:, :8]), dim=1)


def cat_slices_of_channels_last(x: Tensor) -> Tensor:
    one, two = x.chunk(2, dim=1)
    return torch.cat((one, two.relu()), dim=1)


def channel_shuffle(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)


def permuted_layer_norm(x: Tensor) -> Tensor:
    x = x.permute(0, 2, 3, 1)
    return F.layer_norm(x, x.shape[-1:]).permute(0, 3, 1, 2)


def squeeze_excite(x: Tensor) -> Tensor:
    return x * F.adaptive_avg_pool2d(x, 1).sigmoid()


def contiguous_residual(x: Tensor) -> Tensor:
    return torch.rand(x.shape) + x


@dataclass(frozen=True)
class Expected:
    """What torch 2.13 on a CPU does with the operator: the kind of finding, or None."""

    operator: object
    kind: str | None
    name: str
    out: int | None = None


EXPECTED = (
    Expected(grid_sample, "lost", "grid_sample"),
    Expected(nn.InstanceNorm2d(8), "lost", "instance_norm"),
    Expected(nn.CircularPad2d(1), "lost", "pad"),
    Expected(nn.Softmax(1), "lost", "softmax"),
    Expected(torch.tril, "lost", "tril"),
    Expected(torch.triu, "lost", "triu"),
    Expected(nn.FractionalMaxPool2d(2, output_size=4), "lost", "fractional_max_pool2d"),
    Expected(cat_slice_first, "lost", "cat", 16),
    Expected(contiguous_residual, "lost", "add"),
    Expected(channel_shuffle, "converted", "contiguous"),
    Expected(torch.Tensor.contiguous, "converted", "contiguous"),
    Expected(cat_slice_last, "lost", "cat", 16),
    Expected(cat_slices_of_channels_last, None, "cat"),
    Expected(nn.ReflectionPad2d(1), None, "pad"),
    Expected(nn.ReplicationPad2d(1), None, "pad"),
    Expected(nn.UpsamplingNearest2d(scale_factor=2), None, "interpolate"),
    Expected(nn.Upsample(scale_factor=2, mode="bilinear"), None, "interpolate"),
    Expected(nn.BatchNorm2d(8), None, "batch_norm"),
    Expected(nn.GroupNorm(2, 8), None, "group_norm"),
    Expected(nn.MaxPool2d(2), None, "max_pool2d"),
    Expected(nn.PixelShuffle(2), None, "pixel_shuffle", 2),
    Expected(nn.ChannelShuffle(2), None, "channel_shuffle"),
    Expected(permuted_layer_norm, None, "layer_norm"),
    Expected(squeeze_excite, None, "mul"),
    Expected(nn.ReLU(inplace=True), None, "relu"),
)
