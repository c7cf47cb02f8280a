"""The kernels for GPUs, in Triton's language: each ends with a bias, a residual, an activation.

Images lie channels last. Where a kernel reads a tensor that is not there, its pointer is None and a
constant says so, so that the compiler leaves it out. Whole offsets have 32 bits: `launch` refuses
tensors that need more.
"""

import triton
import triton.language as tl


@triton.jit
def _activated(x, name: tl.constexpr, first, second):
    """An activation of `operators.activations`; NaN stays NaN."""
    if name == "relu":
        x = tl.where(x < 0, 0.0, x)
    elif name == "hardtanh":
        x = tl.where(x < first, first, tl.where(x > second, second, x))
    elif name == "leaky_relu" or name == "prelu":
        x = tl.where(x < 0, first * x, x)
    elif name == "hardsigmoid":
        x = _bounded(x + 3) * (1 / 6)
    elif name == "hardswish":
        x = x * _bounded(x + 3) * (1 / 6)
    elif name == "sigmoid":
        x = _sigmoid(x)
    elif name == "silu":
        x = x * _sigmoid(x)
    elif name == "tanh":
        x = _tanh(x)
    elif name == "quick_gelu":
        x = x * _sigmoid(1.702 * x)
    elif name == "squared_relu":
        x = tl.where(x < 0, 0.0, x * x)
    elif name == "gelu" or name == "erf_gelu":
        x = 0.5 * x * (1 + tl.math.erf(x * 0.7071067811865476))
    elif name == "gelu_tanh" or name == "tanh_gelu":
        x = 0.5 * x * (1 + _tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    elif name == "mish":
        # tanh(log(1 + e)) without a logarithm; from 20 on it is 1.
        e = tl.exp(tl.where(x > 20, 20.0, x))
        x = x * (e * e + 2 * e) / (e * e + 2 * e + 2)
    elif name == "elu":
        x = tl.where(x < 0, _exp_less_one(x), x)
    elif name == "selu":
        x = 1.0507009873554805 * tl.where(x < 0, 1.6732632423543772 * _exp_less_one(x), x)
    elif name == "softplus":
        x = tl.where(x > 20, x, tl.log(1 + tl.exp(tl.where(x > 20, 0.0, x))))
    return x


@triton.jit
def _exp_less_one(x):
    return tl.exp(x) - 1


@triton.jit
def _bounded(x):
    return tl.where(x < 0, 0.0, tl.where(x > 6, 6.0, x))


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _tanh(x):
    return 2 * _sigmoid(2 * x) - 1


@triton.jit
def finish(
    x, y, scale, shift, residual, total, channels, inner, first, second,
    SCALES: tl.constexpr, SHIFTS: tl.constexpr, ADDS: tl.constexpr,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = activation(x * scale + shift + residual), of numbers that lie in the same order.

    `inner` numbers of a channel lie side by side: one, where images lie channels last.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    value = tl.load(x + at, mask=inside).to(tl.float32)
    channel = at // inner % channels
    if SCALES:
        value *= tl.load(scale + channel, mask=inside).to(tl.float32)
    if SHIFTS:
        value += tl.load(shift + channel, mask=inside).to(tl.float32)
    if ADDS:
        value += tl.load(residual + at, mask=inside).to(tl.float32)
    value = _activated(value, ACTIVATION, first, second)
    tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit(
    do_not_specialize=["height", "width", "out_height", "out_width", "pad_y", "pad_x"],
)
def depthwise(
    x, y, weight, shift, residual,
    height, width, channels, out_height, out_width, pad_y, pad_x, first, second,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    STRIDE_Y: tl.constexpr, STRIDE_X: tl.constexpr,
    APART_Y: tl.constexpr, APART_X: tl.constexpr,
    SHIFTS: tl.constexpr, ADDS: tl.constexpr, ACTIVATION: tl.constexpr,
    COLUMNS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A filter for each channel; `weight` is HEIGHT x WIDTH x channels.

    A program computes COLUMNS neighbours of a row, of CHANNELS channels.
    """
    row = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    image, top = row // out_height, row % out_height
    known = channel < channels
    total = tl.zeros((COLUMNS, CHANNELS), tl.float32)
    for v in tl.static_range(HEIGHT):
        y_in = top * STRIDE_Y - pad_y + v * APART_Y
        if (y_in >= 0) & (y_in < height):
            line = (image * height + y_in) * width
            for h in tl.static_range(WIDTH):
                x_in = column * STRIDE_X - pad_x + h * APART_X
                inside = ((x_in >= 0) & (x_in < width))[:, None] & known[None, :]
                place = (line + x_in)[:, None] * channels + channel[None, :]
                taken = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
                tap = tl.load(weight + (v * WIDTH + h) * channels + channel, mask=known, other=0.0)
                total += taken * tap.to(tl.float32)[None, :]
    if SHIFTS:
        total += tl.load(shift + channel, mask=known, other=0.0).to(tl.float32)[None, :]
    place = (row * out_width + column)[:, None] * channels + channel[None, :]
    inside = (column < out_width)[:, None] & known[None, :]
    if ADDS:
        total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    total = _activated(total, ACTIVATION, first, second)
    tl.store(y + place, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _rounded(x):
    """float32 numbers rounded to TF32: the matrix units would cut them off."""
    bits = tl.inline_asm_elementwise(
        "cvt.rna.tf32.f32 $0, $1;",
        "=r,r",
        [x.to(tl.int32, bitcast=True)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    return bits.to(tl.float32, bitcast=True)


@triton.jit(
    do_not_specialize=[
        *("pixels", "height", "width", "out_height", "out_width", "taps", "taps_x"),
        *("stride_y", "stride_x", "pad_y", "pad_x", "apart_y", "apart_x"),
    ]
)
def convolve(
    x, y, weight, shift, residual,
    pixels, height, width, channels, out_height, out_width, filters, taken,
    taps, taps_x, stride_y, stride_x, pad_y, pad_x, apart_y, apart_x, first, second,
    POINTS: tl.constexpr, SHIFTS: tl.constexpr, ADDS: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    PIXELS: tl.constexpr, FILTERS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """A convolution as a product: `pixels` places of the result by `filters` of each group.

    `weight` is filters x taps x channels of a group, of which there are `taken`, and is rounded
    already where PRECISION is tf32. A program computes PIXELS x FILTERS sums, DEPTH products at a
    time. With POINTS it has one tap and reads the pixels as they lie, as a linear layer does.
    """
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    filter = tl.program_id(1) * FILTERS + tl.arange(0, FILTERS)
    group = tl.program_id(2)
    depth = tl.arange(0, DEPTH)
    some, wanted = pixel < pixels, filter < filters
    filter = filter + group * filters
    x += group * taken
    rows = weight + filter * taps * taken
    if not POINTS:
        image = pixel // (out_height * out_width)
        place = pixel % (out_height * out_width)
        top = place // out_width * stride_y - pad_y
        left = place % out_width * stride_x - pad_x
    total = tl.zeros((PIXELS, FILTERS), tl.float32)
    steps = tl.cdiv(taken, DEPTH)
    for step in range(taps * steps):
        tap = step // steps
        channel = step % steps * DEPTH + depth
        known = channel < taken
        if POINTS:
            inside = some
            source = pixel * channels
        else:
            y_in = top + tap // taps_x * apart_y
            x_in = left + tap % taps_x * apart_x
            inside = some & (y_in >= 0) & (y_in < height) & (x_in >= 0) & (x_in < width)
            source = ((image * height + y_in) * width + x_in) * channels
        a = tl.load(
            x + source[:, None] + channel[None, :], mask=inside[:, None] & known[None, :], other=0.0
        )
        b = tl.load(
            rows[None, :] + (tap * taken + channel)[:, None],
            mask=wanted[None, :] & known[:, None],
            other=0.0,
        )
        if PRECISION == "tf32":
            a = _rounded(a)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    if SHIFTS:
        total += tl.load(shift + filter, mask=wanted, other=0.0).to(tl.float32)[None, :]
    all_filters = filters * tl.num_programs(2)
    place = pixel[:, None] * all_filters + filter[None, :]
    inside = some[:, None] & wanted[None, :]
    if ADDS:
        total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    total = _activated(total, ACTIVATION, first, second)
    tl.store(y + place, total.to(y.dtype.element_ty), mask=inside)
