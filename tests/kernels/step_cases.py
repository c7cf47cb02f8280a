"""Random steps for tests: inputs, what makes the step, and what float64 says it must compute.

Each maker takes a `random.Random`, which hypothesis can supply, and so shrink.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nhwc.graph.modules.mended import GridSample, WeightedSamples
from nhwc.kernels.convolutions.depthwise import depthwise_step
from nhwc.kernels.convolutions.spec import IMAGE, Frames
from nhwc.kernels.convolutions.transposed import (
    Transposed,
    few_rows_steps,
    has_few_filters,
    pack_few_rows,
    pack_transposed,
    transposed_steps,
)
from nhwc.kernels.language import isa as isas
from nhwc.kernels.layers import (
    attention,
    batched,
    choosing,
    copies,
    elementwise,
    gather,
    linear,
    normalize,
    pooling,
    recurrent,
    resize,
    sample,
)
from nhwc.kernels.layers import moving as move
from nhwc.kernels.layers import unit as to_unit
from nhwc.kernels.layers.group_norm import group_norm_steps, pieces_of
from nhwc.kernels.layers.response import response_steps
from nhwc.kernels.layers.unary import UNARY, clamp_step, unary_step
from nhwc.kernels.tape.invoke import Invocation
from nhwc.kernels.tape.steps import View

from .cases import ACTIVATIONS, STEADY

CHANNELS = (1, 2, 3, 7, 8, 15, 16, 17, 24, 33, 48, 58, 65, 130)


@dataclass
class StepCase:
    """`make(*views, y)` returns the steps; views are those of `inputs`, in order.

    A `dense` result lies without gaps.
    """

    inputs: list[Tensor]
    make: Callable
    expected: Tensor
    sizes: Tensor | float = 1.0
    units: float = 8.0
    dense: bool = False

    def check(self, y):
        """Assert `y`, but for `units` of rounding of the sum of the `sizes` that it is made of."""
        assert y.shape == self.expected.shape
        assert torch.equal(y.isnan(), self.expected.isnan())
        infinite = self.expected.isinf()
        assert torch.equal(y.double()[infinite], self.expected.double()[infinite])
        allowed = 2.0**-24 * (self.units * self.sizes + 16 * self.expected.abs()) + 1e-37
        excess = ((y.double() - self.expected).abs() / allowed)[~infinite & ~y.isnan()]
        assert excess.numel() == 0 or excess.max() < 1, excess.max()


def image(choose, c=None, small=False):
    n, h, w = choose.randint(1, 3), choose.randint(1, 12), choose.randint(1, 20)
    shape = (n, c or choose.choice(CHANNELS), min(h, 5) if small else h, w)
    return torch.randn(shape, generator=torch.Generator().manual_seed(choose.randint(0, 99)))


def finishing(choose, total, sizes):
    """A random activation and perhaps a residual: (settings, extra inputs, expected, sizes)."""
    activation = choose.choice(STEADY)
    extra = [torch.randn(total.shape)] if choose.random() < 0.5 else []
    if extra:
        total, sizes = total + extra[0].double(), sizes + extra[0].abs()
    settings = {"activation": activation, "slope": 0.1}
    return settings, extra, ACTIVATIONS[activation](total), sizes


def depthwise(choose):
    c = choose.choice(CHANNELS)
    square = choose.random() < 0.7
    size = [choose.choice([3, 5, 7])] * 2 if square else [choose.randint(1, 4) for _ in range(2)]
    stride = (choose.randint(1, 2),) * 2 if square else (choose.randint(1, 3), choose.randint(1, 3))
    padding = (size[0] // 2, choose.randint(0, size[1] // 2 + 1))
    dilation = choose.choice([1, 1, 2]) if square else 1
    dilation = (dilation,) * 2 if square else (choose.randint(1, 3), choose.randint(1, 3))
    padding = tuple(p + s // 2 * (d - 1) for p, s, d in zip(padding, size, dilation, strict=True))
    deep = IMAGE
    if choose.random() < 0.5:
        t, moves = choose.randint(1, 3), [choose.randint(1, 2) for _ in range(2)]
        deep = Frames(choose.randint(5, 6), t, moves[0], choose.randint(0, 3), moves[1])
        deep = replace(deep, held=choose.random() < 0.5)
    sides = (deep.d, choose.randint(7, 12), choose.randint(7, 20))
    volume = torch.randn(choose.randint(1, 2), c, *sides)
    weight, bias = torch.randn(c, 1, deep.t, *size), torch.randn(c)

    def convolve(x, w, b):
        window = [
            (getattr(deep, name), *pair)
            for name, pair in (("stride", stride), ("padding", padding), ("dilation", dilation))
        ]
        if deep.held:
            front = deep.padding
            x = x[:, :, torch.arange(-front, deep.d + front).clamp(0, deep.d - 1)]
            window[1] = (0, *padding)
        return F.conv3d(x, w, b, *window, c).flatten(2, 3)

    x = volume.flatten(2, 3)
    total = convolve(volume.double(), weight.double(), bias.double())
    sizes = convolve(volume.abs(), weight.abs(), bias.abs())
    weight = weight.squeeze(2) if deep == IMAGE else weight
    settings, extra, expected, sizes = finishing(choose, total, sizes)

    def make(x, *rest):
        residual, y = (rest[0], rest[1]) if extra else (None, rest[0])
        where = {"stride": stride, "padding": padding, "dilation": dilation}
        where["frames"] = deep
        return depthwise_step(x, y, weight, bias, **where, **settings, residual=residual)

    return StepCase([x, *extra], make, expected, sizes)


def _window(choose, x):
    size = (choose.randint(1, 3), choose.randint(1, 3))
    size = (min(size[0], x.shape[2]), min(size[1], x.shape[3]))
    stride = (choose.randint(1, 3), choose.randint(1, 3))
    return size, stride, (choose.randint(0, size[0] // 2), choose.randint(0, size[1] // 2))


def maxpool(choose):
    x = image(choose)
    x.view(-1)[:: choose.randint(5, 50)] = choose.choice([float("nan"), float("-inf"), 1.0])
    size, stride, padding = _window(choose, x)
    expected = F.max_pool2d(x, size, stride, padding, ceil_mode=choose.random() < 0.5).double()
    where = {"size": size, "stride": stride, "padding": padding}
    return StepCase([x], lambda x, y: pooling.maxpool_step(x, y, **where), expected, units=0)


def avgpool(choose):
    x = image(choose)
    size, stride, padding = _window(choose, x)
    ceil, count = choose.random() < 0.5, choose.random() < 0.5
    divisor = choose.choice([None, None, 3])
    expected = F.avg_pool2d(x.double(), size, stride, padding, ceil, count, divisor)
    where = {"size": size, "stride": stride, "padding": padding}
    where |= {"count_include_pad": count, "divisor": divisor}
    return StepCase([x], lambda x, y: pooling.avgpool_step(x, y, **where), expected, 8.0)


def adaptive_avgpool(choose):
    x = image(choose)
    wanted = choose.choice([(1, 1), (choose.randint(1, 7), choose.randint(1, 7))])
    expected = F.adaptive_avg_pool2d(x.double(), wanted)
    return StepCase([x], pooling.adaptive_avgpool_step, expected, 4.0)


def add(choose):
    x, other = image(choose), None
    other = torch.randn(x.shape)
    activation = choose.choice(STEADY)
    expected = ACTIVATIONS[activation](x.double() + other.double())

    def make(x, other, y):
        return elementwise.add_step(x, other, y, activation=activation, slope=0.1)

    return StepCase([x, other], make, expected, 4.0)


def affine(choose):
    x = image(choose)
    scale, shift = torch.randn(x.shape[1]), torch.randn(x.shape[1])
    wide = scale[:, None, None], shift[:, None, None]
    total, sizes = x.double() * wide[0] + wide[1], x.abs() * wide[0].abs() + wide[1].abs()
    settings, extra, expected, sizes = finishing(choose, total, sizes)

    def make(x, *rest):
        residual, y = (rest[0], rest[1]) if extra else (None, rest[0])
        return elementwise.affine_step(x, y, scale, shift, **settings, residual=residual)

    return StepCase([x, *extra], make, expected, sizes)


def multiply(choose):
    x = image(choose)
    factor = torch.randn(x.shape if choose.random() < 0.5 else (*x.shape[:2], 1, 1))
    expected = x.double() * factor.double()
    return StepCase([x, factor], elementwise.multiply_step, expected)


def copy(choose):
    x = image(choose)
    return StepCase([x], elementwise.copy_step, x.double(), units=0)


def interleave(choose):
    groups = choose.randint(2, 4)
    parts = [image(choose)]
    parts += [torch.randn(parts[0].shape) for _ in range(groups - 1)]
    n, c, h, w = parts[0].shape
    expected = torch.stack(parts, 2).reshape(n, groups * c, h, w).double()
    return StepCase(
        parts, lambda *views: copies.interleave_steps(views[:-1], views[-1]), expected, units=0
    )


def shuffle(choose):
    groups = choose.randint(2, 4)
    x = image(choose, c=groups * choose.choice(CHANNELS))
    expected = F.channel_shuffle(x, groups).double()
    return StepCase([x], lambda x, y: copies.shuffle_steps(x, y, groups), expected, units=0)


def linear_layer(choose):
    x = torch.randn(choose.randint(1, 9), choose.choice(CHANNELS), 1, 1)
    k = choose.choice(CHANNELS)
    weight, bias = torch.randn(k, x.shape[1]), torch.randn(k)
    flat = x.flatten(1)
    total = F.linear(flat.double(), weight.double(), bias.double())[:, :, None, None]
    sizes = F.linear(flat.abs(), weight.abs(), bias.abs())[:, :, None, None]
    settings, extra, expected, sizes = finishing(choose, total, sizes)

    def make(x, *rest):
        residual, y = (rest[0], rest[1]) if extra else (None, rest[0])
        return linear.linear_step(x, y, weight, bias, **settings, residual=residual)

    return StepCase([x, *extra], make, expected, sizes)


def softmax(choose):
    x, logarithm = image(choose), choose.random() < 0.5
    expected = (F.log_softmax if logarithm else F.softmax)(x.double(), dim=1)
    sizes = x.abs().amax(1, keepdim=True) * 2 + 4 if logarithm else 1.0
    return StepCase([x], partial(normalize.softmax_step, logarithm=logarithm), expected, sizes)


def rows_in_one(choose):
    x, kind = image(choose), choose.choice(["sum", "mean", "amax"])
    if choose.random() < 0.3:
        x[0, 0] = float("nan")
    make = lambda x, y: normalize.row_step(x, y, kind=kind)
    sizes = x.nan_to_num().abs().sum(1, keepdim=True)
    return StepCase([x], make, getattr(x.double(), kind)(1, keepdim=True), sizes)


def layer_norm(choose):
    x = image(choose)
    c = x.shape[1]
    weight, bias = torch.randn(c), torch.randn(c)
    last, centred = x.permute(0, 2, 3, 1).double(), choose.random() < 0.5
    if centred:
        normal = F.layer_norm(last, (c,), weight.double(), bias.double(), 0.1)
    else:
        normal = F.rms_norm(last, (c,), weight.double(), 0.1) + bias.double()
    how = {"eps": 0.1, "centred": centred}
    make = lambda x, y: normalize.layer_norm_step(x, y, weight, bias, **how)
    return StepCase([x], make, normal.permute(0, 3, 1, 2), 40.0)


def attending(choose):
    """Attention of one packed matrix or of three, of all tokens in a row or of windows of them."""
    n, heads = choose.randint(1, 3), choose.randint(1, 3)
    depth, outputs = choose.choice([1, 7, 16, 32]), choose.choice([3, 8, 16, 40])
    count = choose.choice([1, 2, 9, 17, 33, 70])
    queries = choose.choice([count, choose.randint(1, 60)])
    size = attention.Attended(n, heads, queries, count, depth, outputs)
    lengths, widths = (queries, count, count), (depth, depth, outputs)
    parts = [torch.randn(n, heads, *shape) for shape in zip(lengths, widths, strict=True)]
    orders = [torch.randperm(n * length) for length in lengths]
    if queries == count:
        # Each head has its queries, keys and values side by side.
        wide, starts = 2 * depth + outputs, (0, depth, 2 * depth)
        packed = torch.cat(parts, 3).transpose(1, 2).reshape(n * count, heads * wide)
        inputs = [packed[orders[0].argsort()].t()[None, :, :, None]]
        kept = [(orders[0], start, wide) for start in starts]
    else:
        rows = [part.transpose(1, 2).flatten(0, 1).flatten(1) for part in parts]
        pairs = list(zip(rows, orders, strict=True))
        inputs = [part[order.argsort()].t()[None, :, :, None] for part, order in pairs]
        kept = [(order, 0, width) for order, width in zip(orders, widths, strict=True)]
    scale, safe = choose.choice([1.0, 0.3, -0.7]), choose.random() < 0.5
    shape = (choose.choice([1, n]), choose.choice([1, heads]), choose.choice([1, queries]), count)
    bias = torch.randn(shape)
    bias[torch.rand(shape) < choose.choice([0.0, 0.2, 1.0])] = float("-inf")
    causal = choose.random() < 0.2
    masked = not causal and choose.random() < 0.7
    turns = (choose.choice([1, n]), choose.choice([1, heads]), choose.choice([1, queries]), count)
    second = torch.randn(turns) if masked and choose.random() < 0.5 else None
    q, k, v = (part.double() for part in parts)
    scores = scale * q @ k.mT + (bias.double() if masked else 0.0)
    scores = scores if second is None else scores + second
    if causal:
        scores = scores.masked_fill(torch.ones(queries, count).tril() == 0, float("-inf"))
    weights = scores.softmax(3).nan_to_num(0.0) if safe else scores.softmax(3)
    sizes = abs(scale) * (q.abs() @ k.mT.abs()) + bias.nan_to_num(neginf=0.0).abs()
    sizes = sizes if second is None else sizes + second.abs()
    sizes = (1 + sizes.amax(3, keepdim=True)) * v.abs().amax(2, keepdim=True)
    places = torch.randperm(n * queries)

    def rows_of(t):
        flat = t.expand(n, heads, queries, outputs).transpose(1, 2).reshape(n * queries, -1)
        return flat[places.argsort()].t()[None, :, :, None]

    def make(*views):
        y = views[-1]
        read = views[:3] if queries != count else views[:1] * 3
        rows = views[3 if queries != count else 1 : -1]
        masks = [
            attention.Mask(view, *one.shape[:3]) for view, one in zip(rows, added, strict=True)
        ]
        lies = tuple(
            attention.Lie(order * view.pixel + start, apart)
            for (order, start, apart), view in zip(kept, read, strict=True)
        )
        where = {"lies": lies, "result": attention.Lie(places * y.pixel, outputs), "masks": masks}
        q, k, v = read
        how = {"scale": scale, "causal": causal, "safe": safe}
        return attention.attention_step(q, k, v, y, size=size, **where, **how)

    added = [one for one in (bias if masked else None, second) if one is not None]
    inputs += [one.reshape(-1, count).t()[None, :, :, None] for one in added]
    return StepCase(inputs, make, rows_of(weights @ v), rows_of(sizes))


def gathered(choose):
    """Pieces of rows in another order, some of them of zeros."""
    n, c, pieces = choose.randint(1, 40), choose.choice(CHANNELS), choose.randint(1, 3)
    rows = choose.randint(1, 50)
    x = torch.randn(1, pieces * c, n, 1)
    kept = torch.randint(-1, n * pieces, (rows * pieces,))
    cut = torch.cat([x[0, :, :, 0].t().reshape(-1, c), torch.zeros(1, c)])
    expected = cut[kept].reshape(rows, pieces * c).t()[None, :, :, None].double()

    def make(x, y):
        number = torch.arange(rows * pieces)
        targets = number // pieces * y.pixel + number % pieces * c
        sources = torch.where(kept < 0, -1, kept // pieces * x.pixel + kept % pieces * c)
        return gather.gather_step(x, y, sources, targets, c)

    return StepCase([x], make, expected, units=0)


def turned(choose):
    """Columns that become rows, a number that is repeated, or a few columns of many."""
    n, c = choose.choice([1, 3, 16, 33, 300]), choose.choice(CHANNELS)
    x, width = torch.randn(1, c, n, 1), choose.choice([1, 5, 40])
    move = choose.choice(
        (
            lambda rows: rows.t(),
            lambda rows: rows[:, 0, None].expand(n, width),
            lambda rows: rows[: n // 2 + 1, c // 3 :].t(),
            lambda rows: rows.reshape(-1, 1).expand(n * c, 3),
            lambda rows: rows.reshape(1, n * c).expand(2, n * c).t(),
        )
    )
    number = torch.arange(n * c).view(n, c)
    expected = move(x[0, :, :, 0].t()).t()[None, :, :, None].double()

    def make(x, y):
        sources = move(number // c * x.pixel + number % c)
        row, column = torch.meshgrid(*map(torch.arange, sources.shape), indexing="ij")
        targets = row * y.pixel + column
        return gather.gather_step(x, y, sources.reshape(-1), targets.reshape(-1))

    return StepCase([x], make, expected, units=0)


def group_norm(choose):
    groups = choose.randint(1, 3)
    x = image(choose, c=groups * choose.choice(CHANNELS)) + choose.choice([0.0, 300.0])
    n, c, h, w = x.shape
    weight, bias = torch.randn(c), torch.randn(c)
    norm = {"weight": weight, "bias": bias, "eps": 0.1, "groups": groups}
    activation = choose.choice(STEADY)
    grouped = x.double().view(n, groups, -1)
    deviation = (grouped.var(2, correction=0, keepdim=True) + 0.1).sqrt()
    normal = ((grouped - grouped.mean(2, keepdim=True)) / deviation).view(x.shape)
    total = normal * weight.double()[:, None, None] + bias.double()[:, None, None]
    # A number of x is rounded before the mean is taken from it.
    rounded = x.abs().amax() / deviation.min()
    pieces = torch.zeros(n * pieces_of(c, h * w), 2 * c, 1, 1)
    rooms = [pieces, torch.zeros(n, 2 * c, 1, 1)]

    beside = [torch.randn(total.shape)] * choose.randint(0, 1)
    total = total + sum(beside).double() if beside else total

    def make(x, pieces, means, *rest):
        *residual, y = rest
        how = {**norm, "activation": activation, "slope": 0.1}
        return group_norm_steps(x, pieces, means, y, *residual, **how)

    sizes = 1 + weight.abs().max() * (1 + rounded) + bias.abs().max()
    return StepCase([x, *rooms, *beside], make, ACTIVATIONS[activation](total), sizes, 40.0)


def transposed(choose):
    """A transposed convolution of an image, or of a volume whose frames lie one below the other."""
    groups = choose.choice((1, 1, 2, 3))
    n, c, k = choose.randint(1, 2), *(groups * choose.choice(CHANNELS[:12]) for _ in range(2))
    if choose.random() < 0.2:
        groups = k = c
    sides = [choose.randint(1, 4) for _ in range(3)]
    size, stride = ([choose.randint(1, 4) for _ in range(3)] for _ in range(2))
    padding = [choose.randint(0, (one - 1) // 2) for one in size]
    dilation = [choose.choice((1, 1, 2, 3)) for _ in range(3)]
    if choose.random() < 0.5:
        sides[0] = size[0] = stride[0] = 1
        padding[0] = 0
    x, weight = torch.randn(n, c, *sides), torch.randn(c, k // groups, *size)
    bias = torch.randn(k) if choose.random() < 0.5 else None
    where = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    wide = None if bias is None else bias.double()
    expected = F.conv_transpose3d(x.double(), weight.double(), wide, **where)
    sizes = F.conv_transpose3d(x.abs(), weight.abs(), None if bias is None else bias.abs(), **where)
    moves = {name: tuple(value) for name, value in where.items() if name != "groups"}
    shapes = tuple(x.shape), tuple(expected.shape)
    spec = Transposed(*shapes, size=tuple(size), groups=groups, **moves)
    exact = choose.random() < 0.5
    if not exact:
        # Winograd's kernels round by what is large in a tile, and not by each sum of its own.
        sizes = sizes.amax((2, 3, 4), keepdim=True).expand_as(sizes)
    below = [one.flatten(2, 3) for one in (expected, sizes)]
    packed = pack_transposed(spec, weight, bias, exact=exact)
    stacked = torch.zeros(spec.stacked).flatten(2, 3)

    def make(x, stacked, y):
        return transposed_steps(spec, packed, x, stacked, y)

    return StepCase([x.flatten(2, 3), stacked], make, *below, 16.0 if exact else 40.0)


def few_transposed(choose):
    """A transposed convolution of few filters, of rows that are wide enough for tiles."""
    n, c, along = choose.randint(1, 2), choose.choice(CHANNELS[:12]), choose.randint(1, 2)
    k = choose.randint(1, isas.host().width // 2 // along)
    sides = [choose.randint(1, 3), choose.randint(1, 3), choose.randint(8, 11)]
    size = [choose.randint(1, 4), choose.randint(1, 4), choose.randint(3, 4)]
    stride = [choose.randint(1, 4), choose.randint(1, 4), along]
    padding = [choose.randint(0, (one - 1) // 2) for one in size]
    x, weight, bias = torch.randn(n, c, *sides), torch.randn(c, k, *size), torch.randn(k)
    where = {"stride": stride, "padding": padding}
    expected = F.conv_transpose3d(x.double(), weight.double(), bias.double(), **where)
    sizes = F.conv_transpose3d(x.abs(), weight.abs(), bias.abs(), **where)
    moves = {name: tuple(value) for name, value in where.items()}
    spec = Transposed(tuple(x.shape), tuple(expected.shape), size=tuple(size), **moves)
    assert has_few_filters(spec)
    rows = pack_few_rows(spec, weight, bias)
    make = lambda x, y: few_rows_steps(spec, rows, x, y)
    below = [one.flatten(2, 3) for one in (expected, sizes)]
    return StepCase([x.flatten(2, 3)], make, *below, 16.0, dense=True)


def resized(choose):
    x = image(choose)
    wanted = (choose.randint(1, 15), choose.randint(1, 15))
    if choose.random() < 0.4:
        exact = choose.random() < 0.5
        mode = "nearest-exact" if exact else "nearest"
        expected = F.interpolate(x, wanted, mode=mode).double()
        return StepCase([x], lambda x, y: resize.nearest_step(x, y, exact=exact), expected, units=0)
    align = choose.random() < 0.5
    expected = F.interpolate(x, wanted, mode="bilinear", align_corners=align).double()
    return StepCase(
        [x], lambda x, y: resize.bilinear_step(x, y, align_corners=align), expected, 20.0
    )


def unit(choose):
    x = image(choose) * choose.choice([1.0, 1e-3])
    expected = F.normalize(x.double(), dim=1, eps=0.01)
    return StepCase([x], lambda x, y: to_unit.unit_step(x, y, eps=0.01), expected, 1.0, 40.0)


def unit_channels(choose):
    x = image(choose) * choose.choice([1.0, 1e-3])
    n, c, h, w = x.shape
    expected = F.normalize(x.double().flatten(2), dim=2, eps=0.01).view(x.shape)
    room = torch.zeros(n * pieces_of(c, h * w), c, 1, 1), torch.zeros(n, c, 1, 1)

    def make(x, pieces, factors, y):
        return to_unit.unit_channel_steps(x, pieces, factors, y, eps=0.01)

    return StepCase([x, *room], make, expected, 1.0, 40.0)


def numbered(choose):
    """A number for each pixel or for all, or for each number."""
    x = image(choose)
    n, _, h, w = x.shape
    changes = {"product": torch.mul, "sum": torch.add, "difference": torch.sub}
    changes |= {"larger": torch.maximum, "smaller": torch.minimum, "quotient": torch.div}
    kind = choose.choice([*changes])
    each = kind in ("larger", "smaller") or (kind == "quotient" and choose.random() < 0.5)
    shape = x.shape if each else choose.choice([(n, 1, h, w), (1, 1, 1, 1)])
    other = (torch.rand(shape) + 0.5).to(memory_format=torch.channels_last)
    step = elementwise.each_step if each else elementwise.pixel_step
    expected = changes[kind](x.double(), other.double())
    return StepCase([x, other], partial(step, kind=kind), expected)


def spread(choose):
    """An image, and one pixel for each image or for all, or one image for all."""
    # As many images as one has pixels, at times.
    x = torch.randn(2, choose.choice(CHANNELS), 1, 2) if choose.random() < 0.2 else image(choose)
    kind = choose.choice(["sum", "difference"])
    other = torch.randn(choose.choice([(*x.shape[:2], 1, 1), (1, *x.shape[1:])]))
    expected = x.double() + (1 if kind == "sum" else -1) * other.double()

    def make(x, other, y):
        return elementwise.spread_step(x, other, y, kind=kind)

    return StepCase([x, other], make, expected)


def sampled(choose):
    """Places within an image, beyond it, and where there is no number."""
    x = image(choose)
    wanted = (choose.randint(1, 6), choose.randint(1, 6))
    grid = (torch.rand(x.shape[0], *wanted, 2) - 0.5) * choose.choice([1.9, 3.0])
    grid.view(-1)[0] = choose.choice([0.0, -1.0, 1.0, 1e30, torch.inf, -torch.inf, torch.nan])
    border, corners = choose.random() < 0.5, choose.random() < 0.5
    mode = "border" if border else "zeros"
    expected = F.grid_sample(x.double(), grid.double(), "bilinear", mode, corners)
    if grid.isnan().any():
        expected = GridSample(mode, corners)(
            x.double().to(memory_format=torch.channels_last), grid.double()
        )

    def make(x, grid, y):
        return sample.sample_step(x, grid, y, border=border, corners=corners)

    # What a place is rounded by, its shares are, and the pixels that they weigh.
    units = 8.0 + 4 * max(x.shape[2:]) * float(grid.nan_to_num(0).abs().clamp(max=2).max())
    return StepCase([x, grid.permute(0, 3, 1, 2)], make, expected, 4 * float(x.abs().max()), units)


def weighted_samples(choose):
    """Sums of places in one to three images, within them and beyond, and where there is none."""
    n, c, queries = choose.randint(1, 3), choose.choice(CHANNELS), choose.randint(1, 5)
    sides = [(choose.randint(1, 7), choose.randint(1, 9)) for _ in range(choose.randint(1, 3))]
    places = [choose.choice([1, 3, 4, 9]) for _ in sides]
    border, corners = choose.random() < 0.5, choose.random() < 0.5
    images = [torch.randn(n, c, *side) for side in sides]
    grids = [(torch.rand(n, queries, count, 2) - 0.5) * 3 for count in places]
    grids[0].view(-1)[0] = choose.choice([0.0, -1.0, 1.0, 1e30, torch.inf, -torch.inf])
    weights = torch.randn(n, 1, queries, sum(places))
    mode = "border" if border else "zeros"
    found = WeightedSamples(mode, corners)
    expected = found([x.double() for x in images], [g.double() for g in grids], weights.double())
    if expected.isnan().any():
        lasts = [x.double().to(memory_format=torch.channels_last) for x in images]
        each = [GridSample(mode, corners)(x, g.double()) for x, g in zip(lasts, grids, strict=True)]
        expected = (torch.cat(each, -1) * weights.double()).sum(-1)
    pixels = torch.cat([x.permute(0, 2, 3, 1).reshape(-1, c) for x in images])
    rows = [torch.cat([g.flatten(2) for g in grids], -1), weights.squeeze(1)]

    def make(x, grid, factors, y):
        settings = {"images": sides, "places": places, "border": border, "corners": corners}
        return sample.weighted_samples_step(x, grid, factors, y, **settings)

    given = [pixels[:, :, None, None], *(one.transpose(1, 2).unsqueeze(-1) for one in rows)]
    most = max(max(side) for side in sides)
    sizes = 4 * sum(places) * max(float(x.abs().max()) for x in images) * float(weights.abs().max())
    return StepCase(given, make, expected.unsqueeze(-1), sizes, 16.0 + 6 * most)


def unary(choose):
    """Functions of one number, of ordinary ones and of those where they end."""
    kind = choose.choice(["clamp", *UNARY])
    x = image(choose) * choose.choice([1.0, 30.0, 1e-40])
    x.view(-1)[: x.numel() // 2] = x.view(-1)[: x.numel() // 2].abs()
    special = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan, 1.0, 3e38, 1e-45])
    x.view(-1)[-7:] = special[: x.numel()]
    if kind == "clamp":
        low, high = choose.choice([(-0.5, 1.5), (0.3, torch.inf), (-torch.inf, 0.25), (2, 1)])
        expected = x.double().clamp(low, high)
        return StepCase([x], lambda x, y: clamp_step(x, y, low=low, high=high), expected, units=0)
    function = {"log_sigmoid": F.logsigmoid, "softsign": F.softsign}.get(kind)
    function = function or getattr(torch, kind)
    # Beyond what a float holds there are zeros and infinities.
    expected = function(x.double()).float().double()
    return StepCase([x], lambda x, y: unary_step(x, y, kind=kind), expected, 0.0)


def compared(choose):
    """Numbers against others or against one, which some equal, and some are none."""
    x = image(choose).round()
    how = choose.choice([*choosing.COMPARED])
    x.view(-1)[0] = choose.choice([torch.inf, -torch.inf, torch.nan, -0.0])
    if choose.random() < 0.5:
        number = choose.choice([0.0, 1.0, -1.0, torch.inf])
        make = partial(choosing.against_step, how=how, number=number)
        return StepCase([x], make, getattr(torch, how)(x, number).double(), units=0)
    other = torch.randn_like(x).round()
    expected = getattr(torch, how)(x, other).double()
    return StepCase([x, other], partial(choosing.compared_step, how=how), expected, units=0)


def chosen(choose):
    """Numbers that truth chooses, or that one number replaces."""
    x = image(choose)
    x.view(-1)[0] = choose.choice([torch.inf, torch.nan, -0.0])
    where, other = (torch.rand_like(x) < 0.5).float(), torch.randn_like(x)
    if choose.random() < 0.5:
        number, answer = choose.choice([0.5, -torch.inf, torch.nan]), choose.choice([0.0, 1.0])
        make = partial(choosing.replaced_step, number=number, answer=answer)
        expected = torch.where(where == answer, number, x).double()
        return StepCase([x, where], make, expected, units=0)
    expected = torch.where(where != 0, x, other).double()
    return StepCase([where, x, other], choosing.chosen_step, expected, units=0)


def small_products(choose):
    """Products of some matrices, whose rows are pixels."""
    count, height = choose.randint(1, 3), choose.randint(1, 9)
    inputs, outputs = choose.choice([1, 5, 16, 33]), choose.choice(CHANNELS)
    x, factors = torch.randn(count * height, inputs), torch.randn(count * inputs, outputs)

    def lying(view, rows):
        return batched.Lying(torch.arange(count) * rows * view.pixel, view.pixel, 1)

    def make(x, factors, y):
        lies = {"x_lies": lying(x, height), "factors_lie": lying(factors, inputs)}
        return batched.batched_step(x, factors, y, inputs=inputs, **lies)

    def product(x, factors):
        made = x.double().view(count, height, inputs) @ factors.double().view(count, inputs, -1)
        return made.view(count * height, outputs, 1, 1)

    given = [one[:, :, None, None] for one in (x, factors)]
    return StepCase(given, make, product(x, factors), product(x.abs(), factors.abs()), inputs)


def moving(choose):
    """Frames, lines and columns taken from places of the input, or from none."""
    n, c, d, h, w = (choose.randint(1, m) for m in (2, 33, 3, 4, 20))
    x = torch.randn(n, c, d, h, w)
    tables = [torch.tensor([choose.randint(-1, m - 1) for _ in range(m + 2)]) for m in (d, h, w)]
    expected = x.double()
    for dim, table in enumerate(tables, 2):
        taken = expected.index_select(dim, table.clamp(min=0)).movedim(dim, -1)
        expected = torch.where(table < 0, torch.tensor(0.5).double(), taken).movedim(-1, dim)
    rows = move.in_frames(*tables[:2], h)
    return StepCase(
        [x.flatten(2, 3)],
        lambda x, y: move.move_step(x, y, rows, tables[2], fill=0.5),
        expected.flatten(2, 3),
        units=0,
    )


def nchw(choose):
    x = image(choose)
    expected = x.flatten(1)[:, :, None, None].double()
    return StepCase([x], copies.nchw_step, expected, units=0)


def response(choose):
    x = image(choose)
    n, c, h, w = x.shape
    weight, bias = torch.randn(2, c)
    size = torch.linalg.vector_norm(x.double(), 2, (2, 3), keepdim=True)
    share = weight.double()[:, None, None] * size / (size.mean(1, keepdim=True) + 0.1)
    expected = x.double() * (1 + share) + bias.double()[:, None, None]
    sizes = x.abs() * (1 + share.abs()) + bias.abs()[:, None, None]
    settings = {"weight": weight, "bias": bias, "eps": 0.1}
    room = torch.zeros(n * pieces_of(c, h * w), c, 1, 1), torch.zeros(n, c, 1, 1)

    def make(x, pieces, factors, y):
        return response_steps(x, pieces, factors, y, **settings)

    return StepCase([x, *room], make, expected, sizes, 16.0)


def recurrent_layer(choose):
    kind, cell = choose.choice([(nn.LSTM, recurrent.LSTM), (nn.GRU, recurrent.GRU)])
    hidden, both = choose.choice((1, 3, 8, 16, 19, 33, 48)), choose.random() < 0.5
    n, length, batch_first = choose.randint(1, 9), choose.randint(1, 6), choose.random() < 0.5
    # Its sums of products are one product: what is added to the gates is the input itself.
    columns = cell.gates * hidden
    module = kind(columns, hidden, bidirectional=both, batch_first=batch_first, dtype=torch.double)
    ends = ("_l0", "_l0_reverse")[: 1 + both]
    given = torch.randn((n, length, columns) if batch_first else (length, n, columns))
    bias = torch.zeros(len(ends), hidden)
    for row, end in zip(bias, ends, strict=True):
        getattr(module, f"weight_ih{end}").data.copy_(torch.eye(columns))
        getattr(module, f"bias_ih{end}").data.zero_()
        getattr(module, f"bias_hh{end}").data[: 2 * hidden if kind is nn.GRU else None] = 0.0
        if kind is nn.GRU:
            row[:] = getattr(module, f"bias_hh{end}").data[2 * hidden :]
    weights = cell.pack([getattr(module, f"weight_hh{end}") for end in ends])
    gates = cell.by_unit(given.reshape(-1, columns).t()).t()
    order = recurrent.Sequences(n, length, *((length, 1) if batch_first else (1, n)))

    def make(x, y):
        more = {"bias": bias} if kind is nn.GRU else {}
        return recurrent.recurrent_steps(x, y, cell, order, weights.float(), **more)

    with torch.no_grad():
        expected = module(given.double())[0].reshape(n * length, -1)
    x = torch.cat([gates] * len(ends), 1)
    return StepCase([x[:, :, None, None]], make, expected[:, :, None, None], 1.0, 40.0)


MAKERS = (
    *(depthwise, maxpool, avgpool, adaptive_avgpool, add, affine, multiply, copy, interleave),
    *(shuffle, linear_layer, softmax, layer_norm, attending, group_norm, transposed),
    *(
        few_transposed,
        resized,
        moving,
        unit,
        unit_channels,
        nchw,
        gathered,
        turned,
        rows_in_one,
        response,
        recurrent_layer,
        numbered,
        spread,
        sampled,
        weighted_samples,
        unary,
        compared,
        chosen,
        small_products,
    ),
)

BEFORE, AFTER = 3, 2
UNTOUCHED = 12345.0


def run(case, choose, threads, allocate=None):
    """Run the steps on channel slices between poison: NaN beside inputs, a mark beside `y`.

    `allocate(values)` supplies the memory instead, and then the views have no gaps.
    """
    buffers, views = {}, []
    blank = torch.full(case.expected.shape, UNTOUCHED)
    for number, tensor in enumerate([*case.inputs, blank]):
        last = tensor is blank
        n, c, h, w = tensor.shape
        dense = allocate or (last and case.dense)
        before, after = (0, 0) if dense else (choose.randint(0, BEFORE), choose.randint(0, AFTER))
        memory = torch.full((n, h, w, before + c + after), UNTOUCHED if last else float("nan"))
        memory[..., before : before + c] = tensor.permute(0, 2, 3, 1)
        buffers[str(number)] = allocate(memory) if allocate else memory
        views.append(View(str(number), (n, c, h, w), before + c + after, before))
    made = case.make(*views)
    steps = made if isinstance(made, list | tuple) else [made]
    Invocation.of(steps, threads)(buffers)
    y = views[-1]
    memory = buffers[str(y.buffer)].reshape(y.shape[0], *y.shape[2:], y.pixel)
    result = memory[..., y.offset : y.offset + y.shape[1]].clone()
    memory[..., y.offset : y.offset + y.shape[1]] = UNTOUCHED
    assert (memory == UNTOUCHED).all(), "wrote beside its channels"
    return result.permute(0, 3, 1, 2)
