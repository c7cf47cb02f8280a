"""Makers of structures that papers name: windows, pyramids, gates, shared and computed weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from .builder import Builder, Made
from .layers import apply, divisor


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels)


def _conv(channels: int, out: int, kernel: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(channels, out, kernel, padding=kernel // 2, **options)


class _Windows(nn.Module):
    """Windows of a shifted image, each mixed by itself with a bias for where it looks."""

    def __init__(self, width: int, window: int, heads: int, shift: int) -> None:
        super().__init__()
        self.window, self.heads, self.shift = window, heads, shift
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        sides = 2 * window - 1
        self.table = nn.Parameter(torch.randn(sides * sides, heads))
        y, x = torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")
        places = torch.stack([y, x]).flatten(1)
        apart = places[:, :, None] - places[:, None] + window - 1
        self.register_buffer("index", apart[0] * sides + apart[1], persistent=False)

    def forward(self, image: Tensor) -> Tensor:
        x = self.norm(image.permute(0, 2, 3, 1))
        batch, height, width, channels = x.shape
        w = self.window
        below, right = (w - height % w) % w, (w - width % w) % w
        x = F.pad(x, (0, 0, 0, right, 0, below))
        tall, wide = x.shape[1], x.shape[2]
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = x.view(batch, tall // w, w, wide // w, w, channels).permute(0, 1, 3, 2, 4, 5)
        rows = x.reshape(-1, w * w, channels)
        packed = self.qkv(rows).view(-1, w * w, 3, self.heads, channels // self.heads)
        q, k, v = packed.permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.view(-1)].view(w * w, w * w, -1).permute(2, 0, 1)
        scores = (q * (channels // self.heads) ** -0.5) @ k.transpose(-2, -1) + bias.unsqueeze(0)
        rows = self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(-1, w * w, channels))
        x = rows.view(batch, tall // w, wide // w, w, w, channels).permute(0, 1, 3, 2, 4, 5)
        x = x.reshape(batch, tall, wide, channels)
        if self.shift:
            x = torch.roll(x, (self.shift, self.shift), (1, 2))
        return image + x[:, :height, :width].permute(0, 3, 1, 2)


class _Folded(nn.Module):
    """Patches are taken out, mixed, and laid back where they were."""

    def __init__(self, channels: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.kernel, self.stride = kernel, stride
        self.mix = nn.Linear(channels * kernel * kernel, channels * kernel * kernel)

    def forward(self, x: Tensor) -> Tensor:
        options: dict[str, Any] = {"kernel_size": self.kernel, "stride": self.stride, "padding": 1}
        patches = self.mix(F.unfold(x, **options).transpose(1, 2)).transpose(1, 2)
        return F.fold(patches, x.shape[-2:], **options)


class _Shuffled(nn.Module):
    def __init__(self, channels: int, times: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.PixelUnshuffle(times), _conv(channels * times**2, channels * times**2, 1),
            _norm(channels * times**2), nn.ReLU(), nn.PixelShuffle(times),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class _Focus(nn.Module):
    """Every other pixel, four times, side by side."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv, self.norm = _conv(4 * channels, out, bias=False), _norm(out)

    def forward(self, x: Tensor) -> Tensor:
        parts = [x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]]
        return F.silu(self.norm(self.conv(torch.cat(parts, 1))))


class _Attended(nn.Module):
    """Channels, then places, weighed by what pools find in them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.among = nn.Conv1d(1, 1, 3, padding=1, bias=False)
        self.shared = nn.Sequential(_conv(channels, 3, 1), nn.ReLU(), _conv(3, channels, 1))
        self.places = _conv(2, 1, 7, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.among(x.mean((2, 3)).unsqueeze(1)).transpose(1, 2).unsqueeze(-1).sigmoid()
        x = x * y.expand_as(x)
        pooled = self.shared(F.adaptive_avg_pool2d(x, 1)) + self.shared(F.adaptive_max_pool2d(x, 1))
        x = pooled.sigmoid() * x
        seen = torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True)[0]], dim=1)
        return x * self.places(seen).sigmoid()


class _Atrous(nn.Module):
    """One image at several rates, and its mean beside them, as large as they are."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.rates = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels, out, 3, padding=rate, dilation=rate, bias=False),
                _norm(out),
                nn.ReLU(),
            )
            for rate in (1, 2, 3)
        )
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), _conv(channels, out, 1), nn.ReLU())
        self.project = nn.Sequential(_conv(4 * out, out, 1, bias=False), _norm(out), nn.Dropout())

    def forward(self, x: Tensor) -> Tensor:
        found = [rate(x) for rate in self.rates]
        found.append(
            F.interpolate(self.pooled(x), size=x.shape[-2:], mode="bilinear", align_corners=False)
        )
        return self.project(torch.cat(found, dim=1))  # type: ignore[no-any-return]


class _Pyramid(nn.Module):
    """Levels on the way down, joined on the way up; one head of several norms looks at all."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(_conv(channels, channels, stride=2) for _ in range(2))
        self.side = nn.ModuleDict({f"p{n}": _conv(channels, out, 1) for n in range(3)})
        self.head = _conv(out, out)
        self.norms = nn.ModuleList(_norm(out) for _ in range(3))

    def levels(self, x: Tensor) -> dict[str, Tensor]:
        found = {"p0": x}
        for number, layer in enumerate(self.down, 1):
            found[f"p{number}"] = x = F.relu(layer(x))
        above = self.side["p2"](found["p2"])
        joined = {"p2": above}
        for name in ("p1", "p0"):
            side = self.side[name](found[name])
            above = side + F.interpolate(above, size=side.shape[-2:], mode="nearest")
            joined[name] = above
        return joined

    def forward(self, x: Tensor) -> Tensor:
        levels = self.levels(x)
        looked = [
            norm(self.head(levels[f"p{number}"])).relu().flatten(2)
            for number, norm in enumerate(self.norms)
        ]
        return torch.cat(looked, -1)


class _Unet(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Sequential(_conv(channels, 8), _norm(8), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(2)
        self.inner = nn.Sequential(_conv(8, 12), nn.InstanceNorm2d(12), nn.LeakyReLU(0.2, True))
        self.up = nn.ConvTranspose2d(12, 8, 2, 2)
        self.last = _conv(16, channels)

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        up = self.up(self.inner(self.pool(first)))
        below, right = first.size(2) - up.size(2), first.size(3) - up.size(3)
        up = F.pad(up, [right // 2, right - right // 2, below // 2, below - below // 2])
        return self.last(torch.cat([first, up], dim=1))  # type: ignore[no-any-return]


class _Rep(nn.Module):
    """Three ways side by side that a deployment would merge into one."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.large = nn.Sequential(
            _conv(channels, channels, groups=groups, bias=False), _norm(channels)
        )
        self.small = nn.Sequential(
            _conv(channels, channels, 1, groups=groups, bias=False), _norm(channels)
        )
        self.identity = _norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.large(x) + self.small(x) + self.identity(x))


class _Dense(nn.Module):
    """Each layer sees all that were before it, norm and activation first."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                _norm(channels + n * growth), nn.ReLU(inplace=True),
                _conv(channels + n * growth, growth, bias=False),
            )
            for n in range(3)
        )  # fmt: skip
        self.norm = _norm(channels + 3 * growth)

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return F.relu(self.norm(torch.cat(found, 1)), inplace=True)


class _Shared(nn.Module):
    """One convolution for two branches, one norm behind two layers, one weight for two calls."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.other = _conv(channels, channels), _conv(channels, channels, 1)
        self.norms = nn.ModuleList([_norm(channels), _norm(channels)])
        self.tied = _conv(channels, channels)
        self.tied.weight = self.conv.weight

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.norms[0](self.conv(x)))
        b = F.relu(self.norms[1](self.conv(x.flip(-1))))
        c = self.norms[0](self.other(x))
        turned = F.conv2d(c, self.conv.weight.flip(2).transpose(0, 1), padding=1)
        return a + b * c + self.norms[1](self.tied(turned))


class _Standardized(nn.Conv2d):
    """Its weight is standardized in each call, with a gain of its own."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__(channels, out, 3, padding=1)
        self.gain = nn.Parameter(torch.ones(out, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(self.weight, dim=[1, 2, 3], keepdim=True, unbiased=False)
        weight = (self.weight - mean) * torch.rsqrt(var + 1e-5) * self.gain
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class _Dynamic(nn.Module):
    """A mixture of experts' filters for each image: images become groups."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, out * channels * 9) / 5)
        self.route, self.out = nn.Linear(channels, 3), out

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        weight = (self.route(x.mean((2, 3))).sigmoid() @ self.experts).view(-1, channels, 3, 3)
        y = F.conv2d(x.reshape(1, -1, height, width), weight, padding=1, groups=batch)
        return y.view(batch, self.out, height, width)


class _Blurred(nn.Module):
    """A filter that is nobody's weight, before every other pixel goes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        row = torch.tensor([1.0, 2.0, 1.0])
        self.register_buffer("filter", (row[:, None] * row / 16)[None, None])
        self.channels, self.norm = channels, _norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (1, 1, 1, 1), mode="reflect")
        kernel = self.filter.expand(self.channels, -1, -1, -1)
        return self.norm(F.conv2d(padded, kernel, stride=2, groups=self.channels))


class _Placed(nn.Module):
    """Where each pixel is, told in three ways."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(1, channels, 5, 5))
        self.longer = nn.Parameter(torch.randn(1, channels, 20, 20))
        self.conv = _conv(channels + 2, channels)

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        x = x + F.interpolate(self.table, (height, width), mode="bicubic", align_corners=False)
        x = x + self.longer[:, :, :height, :width]
        rows = torch.linspace(-1, 1, height, dtype=x.dtype, device=x.device)
        columns = torch.linspace(-1, 1, width, dtype=x.dtype, device=x.device)
        y, z = torch.meshgrid(rows, columns, indexing="ij")
        grid = torch.stack((y, z)).unsqueeze(0).expand(x.shape[0], -1, -1, -1)
        return F.relu(self.conv(torch.cat((x, grid), 1)))


class _Gated(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.wide, self.norm = _conv(channels, 4 * channels, 1), _norm(2 * channels)
        self.deep = _conv(2 * channels, 2 * channels, groups=2 * channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(F.glu(self.wide(x), dim=1))
        a, b = self.deep(y).chunk(2, dim=1)
        return F.gelu(a) * b


class _Responses(nn.Module):
    """Channels that compete by the length of their responses, seen channels last."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.deep = _conv(channels, channels, 7, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.wide, self.narrow = nn.Linear(channels, 12), nn.Linear(12, channels)
        self.gamma = nn.Parameter(torch.randn(1, 1, 1, 12))
        self.beta = nn.Parameter(torch.randn(1, 1, 1, 12))

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.wide(self.norm(self.deep(x).permute(0, 2, 3, 1))))
        length = torch.norm(y, p=2, dim=(1, 2), keepdim=True)
        y = self.gamma * (y * (length / (length.mean(dim=-1, keepdim=True) + 1e-6))) + self.beta + y
        return x + self.narrow(y).permute(0, 3, 1, 2)


class _Spectral(nn.Module):
    """A filter as large as the image, in the frequencies."""

    def __init__(self, channels: int, height: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(channels, height, width // 2 + 1, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.fft.rfft2(x, norm="ortho") * torch.view_as_complex(self.weight)
        return torch.fft.irfft2(y, s=x.shape[-2:], norm="ortho")


class _Recurrent(nn.Module):
    """Columns read one after another, in both directions."""

    def __init__(self, kind: Callable[..., nn.Module], channels: int, height: int) -> None:
        super().__init__()
        self.rnn = kind(channels * height, 4, batch_first=True, bidirectional=True)
        self.out = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.permute(0, 3, 1, 2).flatten(2)
        return self.out(self.rnn(rows)[0])  # type: ignore[no-any-return]


class _Partial(nn.Module):
    """A convolution of some channels, written over them."""

    def __init__(self, channels: int, some: int) -> None:
        super().__init__()
        self.some, self.conv, self.norm = some, _conv(some, some, bias=False), _norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[:, : self.some] = self.conv(x[:, : self.some])
        y[:, self.some :] += 1
        return F.relu(self.norm(y))


class _Branching(nn.Module):
    """Asks what it was built with, and what it can know of a shape."""

    def __init__(self, channels: int, flag: bool) -> None:
        super().__init__()
        self.flag, self.norm = flag, _norm(channels) if flag else None
        self.layers = nn.ModuleList(_conv(channels, channels, 1) for _ in range(3))
        self.options = {"slope": 0.2, "twice": not flag}

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            y = layer(x)
            if self.norm is not None and number != 1:
                y = self.norm(y)
            x = x + y if x.shape[1] == y.shape[1] and number else F.leaky_relu(y, 0.2)
        if self.options["twice"] and x.dim() == 4:
            x = x.repeat(1, 2, 1, 1)
        return x if x.size(-1) > 1 else x.squeeze(-1)


class _Styled(nn.Module):
    """Statistics by hand, and others in their place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv, self.style = _conv(channels, channels), nn.Linear(channels, 2 * channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        mean, var = y.mean((2, 3), keepdim=True), y.var((2, 3), unbiased=False, keepdim=True)
        scale, shift = self.style(x.amax((2, 3))).unsqueeze(-1).unsqueeze(-1).chunk(2, 1)
        return torch.addcmul(shift, (y - mean) / torch.sqrt(var + 1e-5), scale + 1)


class _Linear(nn.Module):
    """Attention without a softmax over pairs: contexts first, by einsum."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv = heads, _conv(channels, 3 * channels, 1, bias=False)
        self.out = nn.Sequential(_conv(channels, channels, 1), nn.GroupNorm(1, channels))

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        parts = self.qkv(x).chunk(3, dim=1)
        q, k, v = (part.reshape(batch, self.heads, -1, height * width) for part in parts)
        context = torch.einsum("bhdn,bhen->bhde", k.softmax(-1), v)
        y = torch.einsum("bhde,bhdn->bhen", context, q.softmax(-2))
        return self.out(y.reshape(batch, channels, height, width))  # type: ignore[no-any-return]


class _Crossed(nn.Module):
    """A few learned queries look at all pixels."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.queries = nn.Embedding(5, channels)
        self.attention = nn.MultiheadAttention(channels, heads, batch_first=True)
        self.norm = nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(2).transpose(1, 2)
        queries = self.queries.weight.unsqueeze(0).repeat(x.shape[0], 1, 1)
        found, _ = self.attention(queries, rows, rows)
        y = self.norm(queries + found)
        return torch.einsum("bqc,bchw->bqhw", y, x)


class _Deeper(nn.Module):
    """Pixels as frames: a convolution of three dimensions on an image of two."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(1, 2, 3, padding=1)
        self.norm = nn.BatchNorm3d(2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.conv(x.unsqueeze(1))))
        return y.max(dim=1).values


class _Axial(nn.Module):
    """Rows, then columns, by convolutions of one dimension."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.row = nn.Sequential(nn.Conv1d(channels, channels, 3, padding=1, bias=False),
                                 nn.BatchNorm1d(channels), nn.ReLU())  # fmt: skip
        self.column = nn.Conv1d(channels, channels, 3, padding=1, groups=channels)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        rows = x.permute(0, 2, 1, 3).reshape(batch * height, channels, width)
        x = self.row(rows).view(batch, height, channels, width).permute(0, 2, 1, 3)
        columns = x.permute(0, 3, 1, 2).flatten(0, 1)
        return self.column(columns).unflatten(0, (batch, width)).permute(0, 2, 3, 1)


class _Scaled(nn.Module):
    """Scalars that are weights, before and behind norms."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.rand(1) + 0.5)
        self.first, self.conv, self.last = (
            _norm(channels), _conv(channels, channels, bias=False), _norm(channels),
        )  # fmt: skip
        self.slope = nn.PReLU(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(self.first(x) * self.a) * self.b
        y = self.slope(self.last(y - self.a))
        return self.a * x + (1 - self.a) * y


class _Unpooled(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        self.conv = _conv(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        y, indices = self.pool(x)
        return self.unpool(self.conv(y).relu(), indices, output_size=x.size())  # type: ignore[no-any-return]


class _Parametrized(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.a = parametrizations.weight_norm(_conv(channels, out))
        self.b = parametrizations.spectral_norm(_conv(out, out, 1))
        self.norm = _norm(out)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.b(F.elu(self.a(x)))))


class _Pooled(nn.Module):
    """Pools of several sizes, each as large as the image again."""

    def __init__(self, channels: int, sizes: tuple[Any, ...]) -> None:
        super().__init__()
        self.pools = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(size), _conv(channels, 2, 1), nn.ReLU6())
            for size in sizes
        )

    def forward(self, x: Tensor) -> Tensor:
        size = (x.size(2), x.size(3))
        ups = [F.interpolate(p(x), size, mode="bilinear", align_corners=True) for p in self.pools]
        return torch.cat([x, *ups], 1)


class _Chosen(nn.Module):
    """The best of the pixels, by index; what is under a mask, replaced."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.score, self.conv = _conv(channels, 1, 1), _conv(channels, channels)
        self.hidden = nn.Parameter(torch.randn(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        score = self.score(x)
        y = torch.where(score > 0, self.conv(x), self.hidden)
        y = y.masked_fill(score.sigmoid() < 0.2, 0.0)
        places = torch.arange(0, x.shape[-1], 2, device=x.device)
        return y.index_select(-1, places)


class _Selective(nn.Module):
    """Kernels of several sizes, weighed against one another by what their sum holds."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.ways = nn.ModuleList(
            nn.Sequential(_conv(channels, channels, kernel, bias=False), _norm(channels), nn.ReLU())
            for kernel in (3, 5)
        )
        self.weigh = nn.Linear(channels, 2 * channels)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.stack([way(x) for way in self.ways], dim=1)
        weights = self.weigh(found.sum(1).mean((-2, -1))).view(x.shape[0], 2, -1).softmax(1)
        return (found * weights[..., None, None]).sum(dim=1)


def structure(b: Builder, x: Tensor) -> Made | None:
    """Any of these on an image."""
    if x.dim() != 4 or 0 in x.shape or x.shape[1] > 32:
        return None
    draw = b.draw
    channels, height, width = x.shape[1:]
    out, heads = draw.choice((channels, 4, 6, 16)), divisor(draw, channels)
    makers: tuple[Callable[[], nn.Module], ...] = (
        lambda: _Windows(channels, draw.choice((2, 3, 4)), heads, draw.choice((0, 1))),
        lambda: _Folded(channels, draw.choice((2, 3)), draw.choice((1, 2))),
        lambda: _Shuffled(channels, draw.choice((2, 3))),
        lambda: _Focus(channels, out), lambda: _Attended(channels),
        lambda: _Atrous(channels, out), lambda: _Pyramid(channels, out),
        lambda: _Unet(channels), lambda: _Rep(channels, heads),
        lambda: _Dense(channels, draw.choice((3, 4))), lambda: _Shared(channels),
        lambda: _Standardized(channels, out), lambda: _Dynamic(channels, out),
        lambda: _Blurred(channels), lambda: _Placed(channels), lambda: _Gated(channels),
        lambda: _Responses(channels), lambda: _Spectral(channels, height, width),
        lambda: _Recurrent(draw.choice((nn.GRU, nn.LSTM, nn.RNN)), channels, height),
        lambda: _Partial(channels, max(1, channels // 2)),
        lambda: _Branching(channels, draw.random() < 0.5), lambda: _Styled(channels),
        lambda: _Linear(channels, heads), lambda: _Crossed(channels, heads),
        lambda: _Deeper(channels), lambda: _Axial(channels), lambda: _Scaled(channels),
        lambda: _Unpooled(channels), lambda: _Parametrized(channels, out),
        lambda: _Pooled(channels, draw.choice(((1, 2, 3), ((2, None), (None, 3)), ((3, 5),)))),
        lambda: _Chosen(channels), lambda: _Selective(channels),
    )  # fmt: skip
    layer = draw.choice(makers)()
    return type(layer).__name__.strip("_").lower(), apply, (), layer
