"""A linear layer: weights in panels of outputs, read once from beginning to end."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import InputError
from .activations import Activation
from .compiler import Args, Kernel
from .loops import ENDING, PADDED_TO, ending, finish, pad_channels
from .steps import Step, View, step
from .values import Value
from .vectors import Emitter

ROWS = 4
"""Images computed together: each weight is loaded once for all of them."""


def linear_step(
    x: View,
    y: View,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = Activation.NONE,
    slope: float = 0.01,
    residual: View | None = None,
) -> Step:
    """activation(x @ weight.T + bias + residual) for each image.

    Where x has several pixels, `weight` counts its inputs as `flatten` does, C, H, W, and is
    reordered here; x must then be dense. What `pack_linear` returned is taken as it is.
    """
    n, c, h, w = x.shape
    if h * w > 1 and x.pixel != c:
        raise InputError("a linear layer over several pixels needs them without gaps: use dense().")
    outputs = y.shape[1]
    return step(
        LINEAR,
        x=x,
        xrow=x.pixel * h * w,
        n=n,
        inputs=c * h * w,
        weight=weight if weight.ndim == 3 else pack_linear(weight, (c, h, w)),
        bias=pad_channels(bias, outputs),
        outputs=outputs,
        **ending(y, activation, slope, residual),
    )


def pack_linear(weight: Tensor, image: tuple[int, int, int]) -> Tensor:
    """Panels of 16 outputs: for each input, in memory order of x, their 16 weights."""
    k = weight.shape[0]
    rows = weight.detach().float().reshape(k, *image).permute(0, 2, 3, 1).reshape(k, -1)
    # The weights of a classifier are the largest of all: what need not be copied twice is not.
    if k % PADDED_TO:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, -k % PADDED_TO))
    return rows.reshape(-1, PADDED_TO, rows.shape[1]).transpose(1, 2).contiguous()


def _emit_linear(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    panels = (a.outputs + (PADDED_TO - 1)) // PADDED_TO
    begin, end = e.share(panels, thread, threads)
    with e.range(begin, end) as panel:
        weights = a.weight.floats() + panel * a.inputs * PADDED_TO
        whole = a.n // ROWS * ROWS
        with e.range(0, whole, ROWS) as row:
            _emit_rows(e, a, (weights, panel * PADDED_TO), row, ROWS)
        with e.range(whole, a.n) as row:
            _emit_rows(e, a, (weights, panel * PADDED_TO), row, 1)


def _emit_rows(e: Emitter, a: Args, panel: tuple[Value, Value], row: Value, rows: int) -> None:
    """`rows` images times one panel."""
    weights, first = panel
    vectors = PADDED_TO // e.width
    # Neighbouring inputs go to sums of their own, as many as half the registers hold: an addition
    # takes four cycles, and shorter sums lose fewer digits.
    apart = max(1, e.isa.registers // 2 // (rows * vectors))
    sums = {
        (r, k, v): e.variable(0.0)
        for r in range(rows)
        for k in range(apart)
        for v in range(vectors)
    }
    for r in range(rows):
        for v in range(vectors):
            sums[r, 0, v].value = e.load(a.bias.floats() + (first + v * e.width))

    def add(column: Value, k: int) -> None:
        for v in range(vectors):
            weight = e.load(weights + ((column + k) * PADDED_TO + v * e.width))
            for r in range(rows):
                x = e.read(a.x.floats() + ((row + r) * a.xrow + (column + k)))
                one = sums[r, k, v]
                one.value = e.fma(e.broadcast(x), weight, one.value)

    even = a.inputs // apart * apart
    with e.range(0, even, apart) as column:
        for k in range(apart):
            add(column, k)
    with e.range(even, a.inputs) as column:
        add(column, 0)
    for v in range(vectors):
        channel = first + v * e.width
        totals = []
        for r in range(rows):
            total = sums[r, 0, v].value
            for k in range(1, apart):
                total = total + sums[r, k, v].value
            totals.append(total)
        left = a.outputs - channel
        with e.when(left >= e.width):
            finish(e, a, totals, row, (channel, None))
        with e.when((left > 0) & (left < e.width)):
            finish(e, a, totals, row, (channel, e.lanes(left)))


LINEAR = Kernel(
    "linear", ("x", "xrow", "n", "inputs", "weight", "bias", "outputs", *ENDING), _emit_linear
)
