"""Makers of what models are built of: blocks, branches, residuals, tokens and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .builder import Builder, Made, randomize
from .layers import Attention, DropPath, Scale, apply, convolution, convolution_of, divisor, spatial


def squeeze(b: Builder, x: Tensor) -> Made | None:
    if not (dims := spatial(x)):
        return None
    channels = x.shape[1]
    kind = convolution_of(dims)
    inner = nn.Sequential(kind(channels, 4, 1), nn.ReLU(), kind(4, channels, 1), nn.Hardsigmoid())
    return "squeeze", lambda inner, x: x * inner(x.mean(list(range(2, x.dim())), True)), (), inner


def block(b: Builder, x: Tensor) -> Made | None:
    """What most networks are made of: a convolution, a batch norm, an activation."""
    made = convolution(b, x)
    if made is None:
        return None
    layer: Any = made[3]
    activation = b.draw.choice(
        (nn.ReLU(inplace=True), nn.ReLU6(), nn.SiLU(), nn.GELU(), nn.Identity())
    )
    norm = _norm_of(spatial(x), layer.out_channels)
    return "block", apply, (), nn.Sequential(layer, norm, activation)


def _norm_of(dims: int, channels: int) -> nn.Module:
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1](channels)
    randomize(norm)
    return norm


class _Padded(nn.Module):
    """A convolution behind padding of its own, more on one side than on the other."""

    def __init__(self, sizes: list[int], layer: nn.Module) -> None:
        super().__init__()
        self.sizes, self.layer = sizes, layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.pad(x, self.sizes))  # type: ignore[no-any-return]


def padded(b: Builder, x: Tensor) -> Made | None:
    if not (dims := spatial(x)):
        return None
    draw, channels = b.draw, x.shape[1]
    out = draw.choice((channels, 6, 16))
    layer = convolution_of(dims)(
        channels, out, draw.choice((2, 3, 3, 5)), draw.choice((1, 2)), draw.choice((0, 0, 1)),
        groups=divisor(draw, channels, out),
    )  # fmt: skip
    return "padded", apply, (), _Padded([draw.randint(0, 2) for _ in range(2 * dims)], layer)


class _Functional(nn.Module):
    """A convolution and a batch norm without layers of their own."""

    def __init__(self, dims: int, channels: int, out: int, groups: int) -> None:
        super().__init__()
        self.call = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
        self.groups = groups
        self.weight = nn.Parameter(torch.randn(out, channels // groups, *[3] * dims) / 5)
        self.bias = nn.Parameter(torch.randn(out))
        self.register_buffer("mean", torch.rand(out))
        self.register_buffer("var", torch.rand(out) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.call(x, self.weight, self.bias, padding=1, groups=self.groups)
        return F.relu(F.batch_norm(y, self.mean, self.var))


def functional(b: Builder, x: Tensor) -> Made | None:
    if not (dims := spatial(x)):
        return None
    out = b.draw.choice((x.shape[1], 4, 12))
    groups = divisor(b.draw, x.shape[1], out)
    return "functional", apply, (), _Functional(dims, x.shape[1], out, groups)


class _Residual(nn.Module):
    """What goes round `body` is added, scaled or dropped as some families do."""

    def __init__(self, body: nn.Module, *after: nn.Module) -> None:
        super().__init__()
        self.body, self.after = body, nn.Sequential(*after)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(self.body(x))  # type: ignore[no-any-return]


class _Moved(nn.Module):
    """Its layers see the channels last, as ConvNeXt's do."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.movedim(1, -1)).movedim(-1, 1)  # type: ignore[no-any-return]


class _Gate(nn.Module):
    def __init__(self, dims: int, channels: int) -> None:
        super().__init__()
        kind, pool = convolution_of(dims), (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)
        self.pool = (*pool, nn.AdaptiveAvgPool3d)[dims - 1](1)
        self.reduce, self.expand = kind(channels, 3, 1), kind(3, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.expand(F.silu(self.reduce(self.pool(x)))).sigmoid()  # type: ignore[no-any-return]


def residual(b: Builder, x: Tensor) -> Made | None:
    """An inverted residual with a gate, a block of ConvNeXt's, or a plain one."""
    if not (dims := spatial(x)) or x.shape[1] not in range(1, 33):
        return None
    draw, channels = b.draw, x.shape[1]
    kind = convolution_of(dims)
    wide = channels * draw.choice((1, 2, 3))
    scale = Scale([channels, *[1] * dims])
    kernel = draw.choice((3, 5, 7))
    inverted = nn.Sequential(
        *(kind(channels, wide, 1, bias=False), _norm_of(dims, wide), nn.SiLU()),
        *(kind(wide, wide, 3, 1, 1, groups=wide, bias=False), _norm_of(dims, wide), nn.ReLU6()),
        *(_Gate(dims, wide), kind(wide, channels, 1, bias=False), _norm_of(dims, channels)),
    )
    rows = _Moved(
        nn.LayerNorm(channels), nn.Linear(channels, wide), nn.GELU(), nn.Linear(wide, channels)
    )
    modern = nn.Sequential(
        kind(channels, channels, kernel, 1, kernel // 2, groups=channels), rows, scale
    )
    plain = nn.Sequential(
        *(kind(channels, wide, 3, 1, 1, bias=False), _norm_of(dims, wide), nn.ReLU(inplace=True)),
        *(kind(wide, channels, 3, 1, 1, bias=False), _norm_of(dims, channels)),
    )
    body = draw.choice((inverted, modern, plain))
    return "residual", apply, (), _Residual(body, *[DropPath()] * draw.choice((0, 1)))


class _Branches(nn.Module):
    """Several branches side by side, or one beside channels that pass and are shuffled in."""

    def __init__(self, branches: Sequence[nn.Module], *, split: bool) -> None:
        super().__init__()
        self.branches, self.split = nn.ModuleList(branches), split

    def forward(self, x: Tensor) -> Tensor:
        if not self.split:
            return torch.cat([branch(x) for branch in self.branches], 1)
        kept, worked = x.chunk(2, 1)
        y = torch.cat((kept, self.branches[0](worked)), 1)
        return y.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


def branches(b: Builder, x: Tensor) -> Made | None:
    if not (dims := spatial(x)) or x.shape[1] > 64:
        return None
    draw, channels = b.draw, x.shape[1]
    kind, split = convolution_of(dims), channels % 2 == 0 and draw.random() < 0.5
    given = channels // 2 if split else channels

    def branch() -> nn.Module:
        kernel = draw.choice((1, 3, 5))
        out = given if split else draw.choice((1, 4, 7))
        layers = (kind(given, out, kernel, 1, kernel // 2), _norm_of(dims, out), nn.ReLU())
        return nn.Sequential(*layers[: draw.choice((1, 2, 3))])

    made = _Branches([branch() for _ in range(draw.choice((2, 3)))], split=split)
    return "branches", apply, (), made


class _Tokens(nn.Module):
    """An image becomes tokens, they look at one another, and become an image again."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x.flatten(2).transpose(1, 2))
        return y.transpose(1, 2).reshape(x.shape)  # type: ignore[no-any-return]


class _Heads(nn.Module):
    """Self-attention of packed rows, by hand or by torch's operator."""

    def __init__(self, width: int, heads: int, *, by_hand: bool) -> None:
        super().__init__()
        self.heads, self.by_hand = heads, by_hand
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, width = x.shape
        packed = self.qkv(x).reshape(batch, rows, 3, self.heads, width // self.heads)
        q, k, v = packed.permute(2, 0, 3, 1, 4)
        if self.by_hand:
            y = (q @ k.mT * (width // self.heads) ** -0.5).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        return self.out(y.transpose(1, 2).reshape(batch, rows, width))  # type: ignore[no-any-return]


def tokens(b: Builder, x: Tensor) -> Made | None:
    if not spatial(x) or 0 in x.shape or x.shape[1] > 64 or x.shape[2:].numel() > 256:
        return None
    draw, width = b.draw, x.shape[1]
    heads = divisor(draw, width)
    layer = draw.choice(
        (
            _Heads(width, heads, by_hand=True),
            _Heads(width, heads, by_hand=False),
            Attention(nn.MultiheadAttention(width, heads, batch_first=True)),
            nn.TransformerEncoderLayer(width, heads, 16, batch_first=True, norm_first=True),
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()),
        )
    )
    return "tokens", apply, (), _Tokens(layer)


def sampled(b: Builder, x: Tensor) -> Made | None:
    """Pixels from where a convolution of the same image says."""
    if spatial(x) != 2:
        return None
    corners = b.draw.random() < 0.5
    mode = b.draw.choice(("bilinear", "bicubic"))

    def sampled(layer: nn.Module, x: Tensor) -> Tensor:
        grid = layer(x).tanh().permute(0, 2, 3, 1)
        return F.grid_sample(x, grid, mode, align_corners=corners)

    return "grid_sample", sampled, (), nn.Conv2d(x.shape[1], 2, 3, padding=1)


def again(b: Builder, x: Tensor) -> Made | None:
    """A layer that was there before, once more."""
    known = [step for step in b.steps if step.layer is not None and len(step.takes) == 1]
    if not known:
        return None
    step = b.draw.choice(known)
    place, function = step.layer, step.function
    layer = b.layers[place]  # type: ignore[index]
    return f"{step.name} again", function, (), layer
