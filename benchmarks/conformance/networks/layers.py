"""Makers of single steps: each looks at a value and says what could follow, or None."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .builder import Builder, Made


def apply(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)  # type: ignore[no-any-return]


def spatial(x: Tensor) -> int:
    """1 to 3 for an image of so many dimensions, 0 for anything else."""
    return x.dim() - 2 if 3 <= x.dim() <= 5 else 0


def spelt(dim: int, x: Tensor) -> int:
    """The same dimension of `x`, in half of the cases counted from the end."""
    return dim - x.dim() if sum(x.shape) % 2 else dim


def convolution_of(dims: int) -> Callable[..., nn.Module]:
    return (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]


def divisor(draw: random.Random, *numbers: int) -> int:
    whole = max(1, math.gcd(*numbers))
    return draw.choice([n for n in range(1, whole + 1) if whole % n == 0])


def convolution(b: Builder, x: Tensor) -> Made | None:
    if not (dims := spatial(x)):
        return None
    draw, channels = b.draw, x.shape[1]
    out = draw.choice((channels, channels * 2, 4, 6, 8, 13, 16, 24))
    groups = draw.choice((1, 1, 1, divisor(draw, channels, out)))
    if draw.random() < 0.2:
        groups, out = channels, channels * draw.choice((1, 1, 2))
    kernel = [draw.choice((1, 1, 2, 3, 3, 5))] * dims
    if draw.random() < 0.3:
        kernel = [draw.choice((1, 2, 3, 4, 7)) for _ in range(dims)]
    dilation = [draw.choice((1, 1, 1, 2, 3)) for _ in range(dims)]
    stride: Any = [draw.choice((1, 1, 1, 2, 3))] * dims
    padding: Any = [draw.randint(0, (k * d) // 2) for k, d in zip(kernel, dilation, strict=True)]
    mode = draw.choice(("zeros",) * 5 + ("circular", "reflect", "replicate"))
    if draw.random() < 0.1:
        stride, padding = 1, "same"
    try:
        layer = convolution_of(dims)(
            channels, out, kernel, stride, padding, dilation, groups, draw.random() < 0.6, mode
        )
    except ValueError:
        return None
    return "conv", apply, (), layer


def transposed(b: Builder, x: Tensor) -> Made | None:
    if not (dims := spatial(x)):
        return None
    draw, channels = b.draw, x.shape[1]
    out = draw.choice((channels, 4, 6, 8))
    groups = draw.choice((1, 1, divisor(draw, channels, out)))
    kernel, stride = draw.choice((1, 2, 3, 4)), draw.choice((1, 2, 2))
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    layer = kind(
        channels, out, kernel, stride, draw.choice((0, 0, 1)), draw.randrange(stride), groups,
        draw.random() < 0.5,
    )  # fmt: skip
    return "conv_transpose", apply, (), layer


def batch_norm(b: Builder, x: Tensor) -> Made | None:
    dims = spatial(x)
    if not dims and x.dim() != 2:
        return None
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims]
    layer = kind(x.shape[1], affine=b.draw.random() < 0.8, eps=b.draw.choice((1e-5, 1e-3)))
    return "batch_norm", apply, (), layer


def norm(b: Builder, x: Tensor) -> Made | None:
    dims, draw = spatial(x), b.draw
    if not dims or x.shape[0] == 0:
        return None
    channels = x.shape[1]
    group = nn.GroupNorm(divisor(draw, channels), channels)
    instance = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 1]
    own = instance(channels, affine=draw.random() < 0.5, track_running_stats=draw.random() < 0.3)
    layer = draw.choice((group, own, nn.LayerNorm(x.shape[1:]), nn.LocalResponseNorm(3)))
    return "norm", apply, (), layer


def activation(b: Builder, x: Tensor) -> Made | None:
    layer = b.draw.choice(
        (
            *(nn.ReLU(), nn.ReLU(), nn.ReLU6(), nn.Hardswish(), nn.Hardsigmoid(), nn.SiLU()),
            *(nn.GELU(), nn.GELU("tanh"), nn.LeakyReLU(0.1), nn.ELU(0.7), nn.Sigmoid(), nn.Tanh()),
            *(
                nn.Softplus(),
                nn.Mish(),
                nn.SELU(),
                nn.CELU(),
                nn.Hardtanh(-0.5, 0.7),
                nn.Identity(),
            ),
            *(nn.Hardtanh(0.2, 3.0), nn.Threshold(0.1, -1.0), nn.Softsign(), nn.LogSigmoid()),
            *(nn.ReLU(inplace=True), nn.SiLU(inplace=True), nn.Dropout(), nn.Hardshrink()),
            *(nn.PReLU(x.shape[1] if x.dim() > 1 else 1), DropPath()),
        )
    )
    if getattr(layer, "inplace", False) and b.draw.random() < 0.6:
        return "activation of a copy", _apply_to_copy, (), layer
    return "activation", apply, (), layer


def _apply_to_copy(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x * 1.5)  # type: ignore[no-any-return]


def function(b: Builder, x: Tensor) -> Made:
    draw = b.draw
    dim = spelt(draw.randrange(x.dim()), x)
    functions: tuple[tuple[str, Callable[..., Any]], ...] = (
        ("relu", F.relu), ("relu", torch.relu), ("relu method", lambda x: x.relu()),
        ("silu by hand", lambda x: x * x.sigmoid()),
        ("hardswish by hand", lambda x: x * F.relu6(x + 3) / 6),
        ("clamp", lambda x: x.clamp(-0.5, 2)), ("clamp_min", lambda x: x.clamp(min=0)),
        ("softmax", lambda x: x.softmax(dim)), ("abs", torch.abs), ("neg", lambda x: -x),
        ("scalar", lambda x: 1.5 * x - 0.5), ("scalar back", lambda x: 2 - x / 3),
        ("flip", lambda x: x.flip(dim)), ("roll", lambda x: x.roll(2, dim)),
        ("mean", lambda x: x.mean(dim, keepdim=True)), ("sum", lambda x: x.sum(dim)),
        ("amax", lambda x: x.amax(dim, keepdim=True)), ("gate", lambda x: x * x.mean(dim, True)),
        ("std", lambda x: x / (x.var(dim, keepdim=True, unbiased=False) + 1e-5).sqrt()),
        ("cumsum", lambda x: x.cumsum(dim)), ("normalize", lambda x: F.normalize(x, dim=dim)),
        ("contiguous", lambda x: x.contiguous()), ("double", lambda x: x.double().to(x.dtype)),
        ("leaky_relu_", lambda x: F.leaky_relu_(x, 0.2)),
        ("dropout", lambda x: F.dropout(x, 0.5, training=False)),
        ("where", lambda x: torch.where(x > 0, x, x * 0.1)), ("sort", lambda x: x.sort(dim)[0]),
    )  # fmt: skip
    name, function = draw.choice(functions)
    return name, function, (), None


def view(b: Builder, x: Tensor) -> Made | None:
    draw = b.draw
    order = draw.sample(range(x.dim()), x.dim())
    back = [order.index(dim) for dim in range(x.dim())]
    dim = draw.randrange(x.dim())
    size = x.shape[dim]
    if size < 1:
        return None
    start = draw.randrange(size)
    cut = divisor(draw, size)
    sizes = [*x.shape[:dim], cut, size // cut, *x.shape[dim + 1 :]]
    index, end = (slice(None),) * dim, spelt(dim, x)
    functions: tuple[tuple[str, Callable[..., Any]], ...] = (
        ("permute", lambda x: x.permute(order)),
        ("there and back", lambda x: F.relu(x.permute(order)).permute(back)),
        ("copied there and back", lambda x: x.permute(order).contiguous().permute(back)),
        ("transpose", lambda x: x.transpose(end, -1)), ("flatten", lambda x: x.flatten(1)),
        ("flatten 2", lambda x: x.flatten(2)), ("unsqueeze", lambda x: x.unsqueeze(dim)),
        ("squeeze", lambda x: x.squeeze(dim)), ("reshape", lambda x: x.reshape(sizes)),
        ("slice", lambda x: x[(*index, slice(start, None))]),
        ("step", lambda x: x[(*index, slice(None, None, 2))]),
        ("ellipsis", lambda x: x[..., start % x.shape[-1] :]),
        ("narrow", lambda x: x.narrow(end, 0, size - start)),
        ("select", lambda x: x.select(end, start)),
        ("chunk", lambda x: x.chunk(2, end)[-1]), ("split", lambda x: x.split(cut, end)[0]),
        ("halves", lambda x: torch.cat(x.chunk(2, end)[::-1], end)),
        ("unbind", lambda x: torch.stack(x.unbind(end)[:4], dim)),
        ("tokens", lambda x: x.flatten(2).transpose(1, 2)),
        ("image", lambda x: x.transpose(1, 2).unsqueeze(-1)),
        ("expand", lambda x: x.unsqueeze(0).expand(2, *x.shape).flatten(0, 1)),
        ("repeat", lambda x: x.repeat_interleave(2, end)),
        ("shuffle", lambda x: x.view(sizes).transpose(dim, dim + 1).flatten(dim, dim + 1)),
    )  # fmt: skip
    name, function = draw.choice(functions)
    return name, function, (), None


def pool(b: Builder, x: Tensor) -> Made | None:
    if not (dims := spatial(x)):
        return None
    draw, last = b.draw, dims - 1
    kernel = draw.choice((1, 2, 3, 3, 5))
    stride, padding = draw.choice((1, 2, 2, 3)), draw.randint(0, kernel // 2)
    ceil = draw.random() < 0.3
    average = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[last]
    largest = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)[last]
    adaptive = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)[last]
    adaptive_max = (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)[last]
    layer = draw.choice(
        (
            average(kernel, stride, padding, ceil, draw.random() < 0.5),
            largest(kernel, stride, padding, draw.choice((1, 1, 2)), False, ceil),
            adaptive(draw.choice((1, 1, 2, 3, 7))),
            adaptive_max(draw.choice((1, 2, 3))),
        )
    )
    return "pool", apply, (), layer


def resize(b: Builder, x: Tensor) -> Made | None:
    if not (dims := spatial(x)):
        return None
    draw = b.draw
    smooth = ("linear", "bilinear", "trilinear")[dims - 1]
    mode = draw.choice(("nearest", "nearest-exact", "area", smooth, smooth, "bicubic"))
    corners = draw.random() < 0.5 if mode in (smooth, "bicubic") else None
    if draw.random() < 0.5:
        scale = draw.choice((0.5, 1.5, 2.0, 2.0, 3.0))
        return (
            f"interpolate {mode} {scale} {corners}",
            lambda x: F.interpolate(x, scale_factor=scale, mode=mode, align_corners=corners),
            (), None,
        )  # fmt: skip
    size = [draw.randint(1, 14) for _ in range(dims)]
    return (
        f"interpolate {mode} {size} {corners}",
        lambda x: F.interpolate(x, size=size, mode=mode, align_corners=corners),
        (), None,
    )  # fmt: skip


def shuffle(b: Builder, x: Tensor) -> Made | None:
    draw = b.draw
    kinds: list[nn.Module] = [nn.PixelShuffle(2), nn.PixelUnshuffle(2)]
    if x.dim() > 2 and x.shape[1]:
        kinds.append(nn.ChannelShuffle(divisor(draw, x.shape[1])))
    return "shuffle", apply, (), draw.choice(kinds)


def pad(b: Builder, x: Tensor) -> Made | None:
    if not (dims := spatial(x)):
        return None
    draw = b.draw
    sizes = [draw.choice((0, 1, 1, 2, -1)) for _ in range(2 * dims)]
    mode = draw.choice(("constant", "constant", "reflect", "replicate", "circular", "layer"))
    if mode == "layer":
        layer = draw.choice(_PADS[dims - 1])([abs(size) for size in sizes])
        return "pad", apply, (), layer
    if mode == "constant":
        value = draw.choice((0.0, 0.0, 1.5))
        return f"pad {sizes} {value}", lambda x: F.pad(x, sizes, value=value), (), None
    if mode == "circular" and min(sizes) < 0:
        # Torch returns what was in memory where nothing is left to repeat.
        return None
    return f"pad {mode} {sizes}", lambda x: F.pad(x, sizes, mode=mode), (), None


_PADS: tuple[tuple[Callable[[Any], nn.Module], ...], ...] = (
    (nn.ReflectionPad1d, nn.ZeroPad1d),
    (nn.ReflectionPad2d, nn.ZeroPad2d, nn.ReplicationPad2d),
    (nn.ReplicationPad3d, nn.ZeroPad3d),
)


def two(b: Builder, x: Tensor) -> Made | None:
    if (other := b.like(x)) is None:
        return None
    dim = b.draw.randrange(x.dim())
    end = spelt(dim, x)
    functions: tuple[tuple[str, Callable[..., Any]], ...] = (
        ("add", lambda x, y: x + y), ("add", torch.add), ("sub", lambda x, y: x - y),
        ("mul", lambda x, y: x * y), ("maximum", torch.maximum),
        ("add relu", lambda x, y: F.relu(x + y)), ("gate", lambda x, y: x * y.sigmoid()),
        ("cat", lambda x, y: torch.cat([x, y], end)), ("lerp", lambda x, y: torch.lerp(x, y, 0.3)),
        ("stack", lambda x, y: torch.stack([x, y], dim)),
        ("add scaled", lambda x, y: torch.add(x, y, alpha=0.5)),
    )  # fmt: skip
    name, function = b.draw.choice(functions)
    return name, function, (other,), None


def write(b: Builder, x: Tensor) -> Made | None:
    draw = b.draw
    dim = draw.randrange(x.dim())
    if not x.shape[dim]:
        return None
    start = draw.randrange(x.shape[dim])
    where = (slice(None),) * dim

    def assigned(x: Tensor) -> Tensor:
        y = x * 1.0
        y[(*where, slice(start, None))] = 0.5
        return y

    def added(x: Tensor) -> Tensor:
        y = x.clone()
        y[(*where, start)] += 1
        return y

    def through_view(x: Tensor) -> Tensor:
        y = x + 0.0
        y.select(spelt(dim, x), start).mul_(2)
        return y

    def chained(x: Tensor) -> Tensor:
        y = x * 2
        z = y
        y += 1
        return y * z

    def filled(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y.copy_(x)
        return y.add_(x, alpha=0.5)

    def in_place(x: Tensor) -> Tensor:
        return x.mul_(0.5)

    def in_place_through_view(x: Tensor) -> Tensor:
        x.select(dim, start).add_(1)
        return x * 1.0

    function = draw.choice(
        (assigned, added, through_view, chained, filled, in_place, in_place_through_view)
    )
    return f"write {function.__name__}", function, (), None


def rows(b: Builder, x: Tensor) -> Made | None:
    """A layer of tokens: what comes last is what it mixes."""
    draw, width = b.draw, x.shape[-1]
    if width > 128 or x.dim() < 2:
        return None
    linear = nn.Linear(width, draw.choice((width, 4, 16)), bias=draw.random() < 0.7)
    kinds: list[nn.Module] = [linear, linear, nn.LayerNorm(width)]
    if x.dim() == 3 and x.shape[0]:
        heads = divisor(draw, width)
        kinds.append(Attention(nn.MultiheadAttention(width, heads, batch_first=True)))
        kinds.append(nn.TransformerEncoderLayer(width, heads, 16, batch_first=True))
    return "rows", apply, (), draw.choice(kinds)


class Attention(nn.Module):
    def __init__(self, layer: nn.MultiheadAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


def attention(b: Builder, x: Tensor) -> Made | None:
    if x.dim() not in (3, 4) or (other := b.like(x)) is None:
        return None
    return "attention", lambda q, k: F.scaled_dot_product_attention(q, k, k), (other,), None


def scale(b: Builder, x: Tensor) -> Made | None:
    if x.dim() < 2:
        return None
    shape = [1] * x.dim()
    dim = b.draw.choice((1, 1, x.dim() - 1))
    shape[dim] = x.shape[dim]
    return "scale", apply, (), Scale(shape[b.draw.choice((0, 1)) :])


class DropPath(nn.Module):
    """Stochastic depth: in eval mode, nothing."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * torch.rand(x.shape[0], *[1] * (x.dim() - 1)).round()


class Scale(nn.Module):
    def __init__(self, shape: list[int]) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(shape) + 0.5)
        self.shift = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.shift
