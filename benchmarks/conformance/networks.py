"""Random networks of what this package is about, from a seed: as odd as PyTorch allows.

A network is a list of steps. Each takes values that were there before and adds its own; what nobody
took is returned. The generator runs each step on real tensors while it builds, so it knows every
shape and never makes a network that eager PyTorch refuses.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .judging import Case

VERBS = ("audit", "fuse", "optimize", "plan", "load")

_GROUP = 50
_MOST = 1 << 16
"""No value has more elements than this: a case should take milliseconds."""


@dataclass(frozen=True)
class Step:
    """A call of `function`, or of the layer of this number, on the values of these numbers."""

    name: str
    function: Callable[..., Any]
    takes: tuple[int, ...]
    layer: int | None = None


class Network(nn.Module):
    def __init__(self, steps: Sequence[Step], layers: Sequence[nn.Module], returns: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.steps = tuple(steps)
        self.returns = returns

    def forward(self, a: Tensor, b: Tensor) -> Any:
        values: list[Any] = [a, b]
        for step in self.steps:
            given = [values[place] for place in step.takes]
            if step.layer is not None:
                given.insert(0, self.layers[step.layer])
            values.append(step.function(*given))
        if isinstance(self.returns, dict):
            return {name: values[place] for name, place in self.returns.items()}
        return self.returns.__class__(values[place] for place in self.returns)

    def text(self) -> str:
        """The steps, a line each, as a bug report shows them."""
        lines = [f"v{n}, input" for n in range(2)]
        for number, step in enumerate(self.steps, 2):
            layer = "" if step.layer is None else f" {self.layers[step.layer]}"
            given = ", ".join(f"v{place}" for place in step.takes)
            lines.append(f"v{number} = {step.name}({given}){layer}")
        return "\n".join([*lines, f"return {self.returns}"])


def groups() -> list[str]:
    return [f"{first}" for first in range(0, 10_000, _GROUP)]


def cases(group: str) -> Iterator[Case]:
    for seed in range(int(group), int(group) + _GROUP):
        model, inputs = network(seed)
        yield Case(f"network {seed}", model, inputs, strides=False, wide=True)


def network(seed: int) -> tuple[Network, tuple[Tensor, ...]]:
    """The network of this seed, in eval mode, and its two inputs."""
    builder = _Builder(random.Random(seed))
    for _ in range(builder.draw.choice((3, 5, 8, 13, 20))):
        builder.grow()
    return builder.finished()


def smaller(model: Network, fails: Callable[[Network], bool], seconds: float = 150.0) -> Network:
    """The smallest network made of `model` by leaving out steps for which `fails` is still true.

    After so many `seconds` it is the smallest so far: what hears nothing for long is ended.
    """
    end = time.monotonic() + seconds
    found = True
    while found:
        found = False
        for place in reversed(range(len(model.steps))):
            for instead in model.steps[place].takes:
                if time.monotonic() > end:
                    return model
                less = _without(model, place, instead)
                if fails(less):
                    model, found = less, True
                    break
    return model


def _without(model: Network, place: int, instead: int) -> Network:
    gone = place + 2

    def now(value: int) -> int:
        value = instead if value == gone else value
        return value - (value > gone)

    steps = [
        replace(step, takes=tuple(map(now, step.takes)))
        for number, step in enumerate(model.steps)
        if number != place
    ]
    returns = model.returns
    if isinstance(returns, dict):
        returns = {name: now(value) for name, value in returns.items()}
    else:
        returns = returns.__class__(map(now, returns))
    return Network(steps, list(model.layers), returns).eval()


class _Builder:
    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        torch.manual_seed(draw.randrange(1 << 30))
        dims = draw.choice((2, 2, 2, 2, 1, 3))
        batch = draw.choice((1, 1, 2, 3, 0)) if draw.random() < 0.3 else draw.choice((1, 2))
        most = {1: 40, 2: 20, 3: 9}[dims]
        shape = (
            batch,
            draw.choice((1, 3, 4, 8, 12, 17)),
            *(draw.randint(5, most) for _ in range(dims)),
        )
        self.steps: list[Step] = []
        self.layers: list[nn.Module] = []
        self.values: list[Tensor] = [torch.randn(shape), torch.randn(self._beside(shape))]
        if dims == 2 and draw.random() < 0.3:
            self.values = [_channels_last(x) for x in self.values]
        self.inputs = tuple(x.clone() for x in self.values)

    def _beside(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the second input: the first's, another image's, or that of a few numbers."""
        draw, (batch, channels, *sides) = self.draw, shape
        kind = draw.random()
        if kind < 0.7:
            return shape
        if kind < 0.9:
            return (batch, draw.choice((channels, 2, 5)), *(max(1, side // 2) for side in sides))
        return (batch, channels)

    def grow(self) -> None:
        """Add a step; try others where PyTorch refuses one."""
        for _ in range(20):
            make = self.draw.choice(_STEPS)
            if self._adds(make):
                return

    def _adds(self, make: Callable[..., Any]) -> bool:
        known = len(self.layers)
        place = self._some_value()
        made = make(self, self.values[place])
        if made is None:
            return False
        name, function, others, layer = made
        layer_place = None
        if layer is not None:
            _randomize(layer)
            self.layers.append(layer.eval())
            layer_place = known
        takes = (place, *others)
        # Writes reach the values that share memory, as they do when the network runs.
        given = [self.values[p] for p in takes]
        try:
            with torch.no_grad():
                value = function(*([] if layer is None else [layer]), *given)
        except (RuntimeError, ValueError, IndexError, NotImplementedError, AssertionError):
            del self.layers[known:]
            return False
        if not isinstance(value, Tensor) or value.numel() > _MOST or not value.dim():
            del self.layers[known:]
            return False
        if value.is_floating_point() and not bool(value.isfinite().all()):
            del self.layers[known:]
            return False
        self.steps.append(Step(name, function, takes, layer_place))
        self.values.append(value)
        return True

    def _some_value(self) -> int:
        """A value, most likely one of the last."""
        last = len(self.values) - 1
        return max(0, last - int(self.draw.expovariate(0.7)))

    def like(self, x: Tensor) -> int | None:
        """Another value of the same shape."""
        found = [place for place, y in enumerate(self.values) if y.shape == x.shape]
        return self.draw.choice(found) if found else None

    def finished(self) -> tuple[Network, tuple[Tensor, ...]]:
        taken = {place for step in self.steps for place in step.takes}
        unread = [place for place in range(2, len(self.values)) if place not in taken]
        returned = unread[-3:] or [len(self.values) - 1]
        kind = self.draw.choice((tuple, list, dict))
        returns = {f"out{n}": p for n, p in enumerate(returned)} if kind is dict else kind(returned)
        return Network(self.steps, self.layers, returns).eval(), self.inputs


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def _randomize(layer: nn.Module) -> None:
    """Give statistics and scales values that would show a fold that is wrong."""
    for name, value in [*layer.named_parameters(), *layer.named_buffers()]:
        if "var" in name:
            nn.init.uniform_(value, 0.5, 2.0)
        elif "mean" in name or (value.dim() == 1 and value.is_floating_point()):
            nn.init.uniform_(value, -1.0, 1.0)


# Steps. Each maker looks at a value and gives the step's name, function, other values and layer.

_Made = tuple[str, Callable[..., Any], tuple[int, ...], nn.Module | None]


def _apply(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)  # type: ignore[no-any-return]


def _dims(x: Tensor) -> int:
    """1 to 3 for an image of so many dimensions, 0 for anything else."""
    return x.dim() - 2 if 3 <= x.dim() <= 5 else 0


def _divisor(draw: random.Random, *numbers: int) -> int:
    whole = max(1, math.gcd(*numbers))
    return draw.choice([n for n in range(1, whole + 1) if whole % n == 0])


def _convolution(b: _Builder, x: Tensor) -> _Made | None:
    if not (dims := _dims(x)):
        return None
    draw, channels = b.draw, x.shape[1]
    out = draw.choice((channels, channels * 2, 4, 6, 8, 13, 16, 24))
    groups = draw.choice((1, 1, 1, _divisor(draw, channels, out)))
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
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    try:
        layer = kind(
            channels, out, kernel, stride, padding, dilation, groups, draw.random() < 0.6, mode
        )
    except ValueError:
        return None
    return "conv", _apply, (), layer


def _transposed(b: _Builder, x: Tensor) -> _Made | None:
    if not (dims := _dims(x)):
        return None
    draw, channels = b.draw, x.shape[1]
    out = draw.choice((channels, 4, 6, 8))
    groups = draw.choice((1, 1, _divisor(draw, channels, out)))
    kernel, stride = draw.choice((1, 2, 3, 4)), draw.choice((1, 2, 2))
    kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
    layer = kind(
        channels, out, kernel, stride, draw.choice((0, 0, 1)), draw.randrange(stride), groups,
        draw.random() < 0.5,
    )  # fmt: skip
    return "conv_transpose", _apply, (), layer


def _batch_norm(b: _Builder, x: Tensor) -> _Made | None:
    dims = _dims(x)
    if not dims and x.dim() != 2:
        return None
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims]
    layer = kind(x.shape[1], affine=b.draw.random() < 0.8, eps=b.draw.choice((1e-5, 1e-3)))
    return "batch_norm", _apply, (), layer


def _norm(b: _Builder, x: Tensor) -> _Made | None:
    dims, draw = _dims(x), b.draw
    if not dims or x.shape[0] == 0:
        return None
    channels = x.shape[1]
    group = nn.GroupNorm(_divisor(draw, channels), channels)
    instance = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 1]
    own = instance(channels, affine=draw.random() < 0.5, track_running_stats=draw.random() < 0.3)
    layer = draw.choice((group, own, nn.LayerNorm(x.shape[1:]), nn.LocalResponseNorm(3)))
    return "norm", _apply, (), layer


def _activation(b: _Builder, x: Tensor) -> _Made | None:
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
            *(nn.PReLU(x.shape[1] if x.dim() > 1 else 1), _DropPath()),
        )
    )
    if getattr(layer, "inplace", False) and b.draw.random() < 0.6:
        return "activation of a copy", _apply_to_copy, (), layer
    return "activation", _apply, (), layer


def _apply_to_copy(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x * 1.5)  # type: ignore[no-any-return]


def _function(b: _Builder, x: Tensor) -> _Made:
    draw = b.draw
    dim = draw.randrange(x.dim())
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


def _view(b: _Builder, x: Tensor) -> _Made | None:
    draw = b.draw
    order = draw.sample(range(x.dim()), x.dim())
    back = [order.index(dim) for dim in range(x.dim())]
    dim = draw.randrange(x.dim())
    size = x.shape[dim]
    if size < 1:
        return None
    start = draw.randrange(size)
    cut = _divisor(draw, size)
    sizes = [*x.shape[:dim], cut, size // cut, *x.shape[dim + 1 :]]
    index = (slice(None),) * dim
    functions: tuple[tuple[str, Callable[..., Any]], ...] = (
        ("permute", lambda x: x.permute(order)),
        ("there and back", lambda x: F.relu(x.permute(order)).permute(back)),
        ("copied there and back", lambda x: x.permute(order).contiguous().permute(back)),
        ("transpose", lambda x: x.transpose(dim, -1)), ("flatten", lambda x: x.flatten(1)),
        ("flatten 2", lambda x: x.flatten(2)), ("unsqueeze", lambda x: x.unsqueeze(dim)),
        ("squeeze", lambda x: x.squeeze(dim)), ("reshape", lambda x: x.reshape(sizes)),
        ("slice", lambda x: x[(*index, slice(start, None))]),
        ("step", lambda x: x[(*index, slice(None, None, 2))]),
        ("ellipsis", lambda x: x[..., start % x.shape[-1] :]),
        ("narrow", lambda x: x.narrow(dim, 0, size - start)),
        ("select", lambda x: x.select(dim, start)),
        ("chunk", lambda x: x.chunk(2, dim)[-1]), ("split", lambda x: x.split(cut, dim)[0]),
        ("halves", lambda x: torch.cat(x.chunk(2, dim)[::-1], dim)),
        ("unbind", lambda x: torch.stack(x.unbind(dim)[:4], dim)),
        ("tokens", lambda x: x.flatten(2).transpose(1, 2)),
        ("image", lambda x: x.transpose(1, 2).unsqueeze(-1)),
        ("expand", lambda x: x.unsqueeze(0).expand(2, *x.shape).flatten(0, 1)),
        ("repeat", lambda x: x.repeat_interleave(2, dim)),
        ("shuffle", lambda x: x.view(sizes).transpose(dim, dim + 1).flatten(dim, dim + 1)),
    )  # fmt: skip
    name, function = draw.choice(functions)
    return name, function, (), None


def _pool(b: _Builder, x: Tensor) -> _Made | None:
    if not (dims := _dims(x)):
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
    return "pool", _apply, (), layer


def _resize(b: _Builder, x: Tensor) -> _Made | None:
    if not (dims := _dims(x)):
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


def _shuffle(b: _Builder, x: Tensor) -> _Made | None:
    draw = b.draw
    kinds: list[nn.Module] = [nn.PixelShuffle(2), nn.PixelUnshuffle(2)]
    if x.dim() > 2 and x.shape[1]:
        kinds.append(nn.ChannelShuffle(_divisor(draw, x.shape[1])))
    return "shuffle", _apply, (), draw.choice(kinds)


def _pad(b: _Builder, x: Tensor) -> _Made | None:
    if not (dims := _dims(x)):
        return None
    draw = b.draw
    sizes = [draw.choice((0, 1, 1, 2, -1)) for _ in range(2 * dims)]
    mode = draw.choice(("constant", "constant", "reflect", "replicate", "circular", "layer"))
    if mode == "layer":
        layer = draw.choice(_PADS[dims - 1])([abs(size) for size in sizes])
        return "pad", _apply, (), layer
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


def _two(b: _Builder, x: Tensor) -> _Made | None:
    if (other := b.like(x)) is None:
        return None
    dim = b.draw.randrange(x.dim())
    functions: tuple[tuple[str, Callable[..., Any]], ...] = (
        ("add", lambda x, y: x + y), ("add", torch.add), ("sub", lambda x, y: x - y),
        ("mul", lambda x, y: x * y), ("maximum", torch.maximum),
        ("add relu", lambda x, y: F.relu(x + y)), ("gate", lambda x, y: x * y.sigmoid()),
        ("cat", lambda x, y: torch.cat([x, y], dim)), ("lerp", lambda x, y: torch.lerp(x, y, 0.3)),
        ("stack", lambda x, y: torch.stack([x, y], dim)),
        ("add scaled", lambda x, y: torch.add(x, y, alpha=0.5)),
    )  # fmt: skip
    name, function = b.draw.choice(functions)
    return name, function, (other,), None


def _write(b: _Builder, x: Tensor) -> _Made | None:
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
        y.select(dim, start).mul_(2)
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


def _rows(b: _Builder, x: Tensor) -> _Made | None:
    """A layer of tokens: what comes last is what it mixes."""
    draw, width = b.draw, x.shape[-1]
    if width > 128 or x.dim() < 2:
        return None
    linear = nn.Linear(width, draw.choice((width, 4, 16)), bias=draw.random() < 0.7)
    kinds: list[nn.Module] = [linear, linear, nn.LayerNorm(width)]
    if x.dim() == 3 and x.shape[0]:
        heads = _divisor(draw, width)
        kinds.append(_Attention(nn.MultiheadAttention(width, heads, batch_first=True)))
        kinds.append(nn.TransformerEncoderLayer(width, heads, 16, batch_first=True))
    return "rows", _apply, (), draw.choice(kinds)


class _Attention(nn.Module):
    def __init__(self, layer: nn.MultiheadAttention) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]


def _attention(b: _Builder, x: Tensor) -> _Made | None:
    if x.dim() not in (3, 4) or (other := b.like(x)) is None:
        return None
    return "attention", lambda q, k: F.scaled_dot_product_attention(q, k, k), (other,), None


def _scale(b: _Builder, x: Tensor) -> _Made | None:
    if x.dim() < 2:
        return None
    shape = [1] * x.dim()
    dim = b.draw.choice((1, 1, x.dim() - 1))
    shape[dim] = x.shape[dim]
    return "scale", _apply, (), _Scale(shape[b.draw.choice((0, 1)) :])


class _DropPath(nn.Module):
    """Stochastic depth: in eval mode, nothing."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * torch.rand(x.shape[0], *[1] * (x.dim() - 1)).round()


class _Scale(nn.Module):
    def __init__(self, shape: list[int]) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(shape) + 0.5)
        self.shift = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain + self.shift


def _squeeze(b: _Builder, x: Tensor) -> _Made | None:
    if not (dims := _dims(x)):
        return None
    channels = x.shape[1]
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    inner = nn.Sequential(kind(channels, 4, 1), nn.ReLU(), kind(4, channels, 1), nn.Hardsigmoid())
    return "squeeze", lambda inner, x: x * inner(x.mean(list(range(2, x.dim())), True)), (), inner


def _block(b: _Builder, x: Tensor) -> _Made | None:
    """What most networks are made of: a convolution, a batch norm, an activation."""
    made = _convolution(b, x)
    if made is None:
        return None
    convolution: Any = made[3]
    kind = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[_dims(x) - 1]
    activation = b.draw.choice(
        (nn.ReLU(inplace=True), nn.ReLU6(), nn.SiLU(), nn.GELU(), nn.Identity())
    )
    norm = kind(convolution.out_channels)
    _randomize(norm)
    return "block", _apply, (), nn.Sequential(convolution, norm, activation)


def _convolution_of(dims: int) -> Callable[..., nn.Module]:
    return (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]


def _norm_of(dims: int, channels: int) -> nn.Module:
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims - 1](channels)
    _randomize(norm)
    return norm


class _Padded(nn.Module):
    """A convolution behind padding of its own, more on one side than on the other."""

    def __init__(self, sizes: list[int], layer: nn.Module) -> None:
        super().__init__()
        self.sizes, self.layer = sizes, layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.pad(x, self.sizes))  # type: ignore[no-any-return]


def _padded(b: _Builder, x: Tensor) -> _Made | None:
    if not (dims := _dims(x)):
        return None
    draw, channels = b.draw, x.shape[1]
    out = draw.choice((channels, 6, 16))
    layer = _convolution_of(dims)(
        channels, out, draw.choice((2, 3, 3, 5)), draw.choice((1, 2)), draw.choice((0, 0, 1)),
        groups=_divisor(draw, channels, out),
    )  # fmt: skip
    return "padded", _apply, (), _Padded([draw.randint(0, 2) for _ in range(2 * dims)], layer)


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


def _functional(b: _Builder, x: Tensor) -> _Made | None:
    if not (dims := _dims(x)):
        return None
    out = b.draw.choice((x.shape[1], 4, 12))
    groups = _divisor(b.draw, x.shape[1], out)
    return "functional", _apply, (), _Functional(dims, x.shape[1], out, groups)


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
        kind, pool = _convolution_of(dims), (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)
        self.pool = (*pool, nn.AdaptiveAvgPool3d)[dims - 1](1)
        self.reduce, self.expand = kind(channels, 3, 1), kind(3, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.expand(F.silu(self.reduce(self.pool(x)))).sigmoid()  # type: ignore[no-any-return]


def _residual(b: _Builder, x: Tensor) -> _Made | None:
    """An inverted residual with a gate, a block of ConvNeXt's, or a plain one."""
    if not (dims := _dims(x)) or x.shape[1] > 32:
        return None
    draw, channels = b.draw, x.shape[1]
    kind = _convolution_of(dims)
    wide = channels * draw.choice((1, 2, 3))
    scale = _Scale([channels, *[1] * dims])
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
    return "residual", _apply, (), _Residual(body, *[_DropPath()] * draw.choice((0, 1)))


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


def _branches(b: _Builder, x: Tensor) -> _Made | None:
    if not (dims := _dims(x)) or x.shape[1] > 64:
        return None
    draw, channels = b.draw, x.shape[1]
    kind, split = _convolution_of(dims), channels % 2 == 0 and draw.random() < 0.5
    given = channels // 2 if split else channels

    def branch() -> nn.Module:
        kernel = draw.choice((1, 3, 5))
        out = given if split else draw.choice((1, 4, 7))
        layers = (kind(given, out, kernel, 1, kernel // 2), _norm_of(dims, out), nn.ReLU())
        return nn.Sequential(*layers[: draw.choice((1, 2, 3))])

    made = _Branches([branch() for _ in range(draw.choice((2, 3)))], split=split)
    return "branches", _apply, (), made


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


def _tokens(b: _Builder, x: Tensor) -> _Made | None:
    if not _dims(x) or not x.shape[0] or x.shape[1] > 64 or x[0, 0].numel() > 256:
        return None
    draw, width = b.draw, x.shape[1]
    heads = _divisor(draw, width)
    layer = draw.choice(
        (
            _Heads(width, heads, by_hand=True),
            _Heads(width, heads, by_hand=False),
            _Attention(nn.MultiheadAttention(width, heads, batch_first=True)),
            nn.TransformerEncoderLayer(width, heads, 16, batch_first=True, norm_first=True),
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()),
        )
    )
    return "tokens", _apply, (), _Tokens(layer)


def _sampled(b: _Builder, x: Tensor) -> _Made | None:
    """Pixels from where a convolution of the same image says."""
    if _dims(x) != 2:
        return None
    corners = b.draw.random() < 0.5
    mode = b.draw.choice(("bilinear", "bicubic"))

    def sampled(layer: nn.Module, x: Tensor) -> Tensor:
        grid = layer(x).tanh().permute(0, 2, 3, 1)
        return F.grid_sample(x, grid, mode, align_corners=corners)

    return "grid_sample", sampled, (), nn.Conv2d(x.shape[1], 2, 3, padding=1)


def _again(b: _Builder, x: Tensor) -> _Made | None:
    """A layer that was there before, once more."""
    known = [step for step in b.steps if step.layer is not None and len(step.takes) == 1]
    if not known:
        return None
    step = b.draw.choice(known)
    place, function = step.layer, step.function
    layer = b.layers[place]  # type: ignore[index]
    return f"{step.name} again", function, (), layer


_STEPS = (
    *(_block, _block, _block, _block, _convolution, _convolution, _convolution, _transposed),
    *(
        _batch_norm,
        _batch_norm,
        _norm,
        _activation,
        _activation,
        _function,
        _function,
        _view,
        _view,
    ),
    *(_pool, _resize, _shuffle, _pad, _two, _two, _two, _write, _rows, _attention, _scale),
    *(_squeeze, _again, _padded, _padded, _functional, _residual, _residual, _branches),
    *(_branches, _tokens, _tokens, _sampled),
)
