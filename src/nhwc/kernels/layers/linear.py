"""A linear layer on the weights as they lie: they are the largest of all, and each is read once.

A classifier multiplies a few images by a few million weights: it waits for memory, whatever it
computes. So weights are not packed, which would take as much memory again. An output is a sum along
a row of weights, in vectors, added across in the end:

    weights of output 0   [wwww][wwww][wwww] ...      _TOGETHER rows are read side by side, and
    weights of output 1   [wwww][wwww][wwww] ...      each vector is multiplied for ROWS images
    ...                     x     x     x
    image                 [xxxx][xxxx][xxxx] ...

Threads share out panels of outputs, so that no weight is read twice while images are few. Many rows
are computed as a 1x1 convolution instead, with packed weights.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

from torch import Tensor

from ...errors import InputError
from ..language.compiler import Args, Kernel
from ..language.loops import PADDED_TO, Place, each_vector
from ..language.values import Value
from ..language.vectors import Emitter
from ..product.moments import across
from ..product.weights import pad_channels
from ..tape.steps import Step, View, step
from .activations import Activation
from .ending import ENDING, ending, finish

ROWS = 4
"""Images computed together: each weight is loaded once for all of them."""
_PANEL = PADDED_TO
"""Outputs that a thread ends together: no vector is wider."""
_TOGETHER = 4
"""Outputs whose weights are read side by side: memory serves several streams faster than one."""


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

    Where x has several pixels, `weight` counts its inputs as `flatten` does, C, H, W, and is copied
    in another order; x must then be dense.
    """
    n, c, h, w = x.shape
    if h * w > 1 and x.pixel != c:
        raise InputError("a linear layer over several pixels needs them without gaps: use dense().")
    outputs = y.shape[1]
    return step(
        LINEAR,
        x=x,
        x_row=x.pixel * h * w,
        n=n,
        inputs=c * h * w,
        weights=_in_order(weight, (c, h, w)),
        bias=pad_channels(bias, outputs),
        outputs=outputs,
        **ending(y, activation, slope, residual),
    )


def _in_order(weight: Tensor, image: tuple[int, int, int]) -> Tensor:
    """The weights of each output in the order in which x lies in memory; no copy if they are."""
    rows = weight.detach().float().reshape(-1, *image).permute(0, 2, 3, 1)
    return rows.reshape(len(weight), -1).contiguous()


class _Images(NamedTuple):
    """Images computed together: the number of the first, and how many."""

    first: Value
    number: int


class _Outputs(NamedTuple):
    """Outputs whose weights are read side by side: the number of the first, and how many."""

    first: Value
    number: int


def _emit_linear(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    begin, end = e.share((a.outputs + (_PANEL - 1)) // _PANEL, thread, threads)
    sums = e.stack(ROWS * _PANEL)
    with e.range(begin, end) as panel:
        whole = a.n // ROWS * ROWS
        with e.range(0, whole, ROWS) as row:
            _emit_panel(e, a, panel * _PANEL, _Images(row, ROWS), sums)
        with e.range(whole, a.n) as row:
            _emit_panel(e, a, panel * _PANEL, _Images(row, 1), sums)


def _emit_panel(e: Emitter, a: Args, first: Value, images: _Images, sums: Value) -> None:
    """Compute some outputs of some images: first all sums, then bias, residual and activation."""
    row, rows = images
    count = e.min(a.outputs - first, e.i64(_PANEL))
    together = count // _TOGETHER * _TOGETHER
    with e.range(0, together, _TOGETHER) as output:
        _emit_products(e, a, _Outputs(first + output, _TOGETHER), images, sums + output)
    with e.range(together, count) as output:
        _emit_products(e, a, _Outputs(first + output, 1), images, sums + output)
    with e.range(0, count, e.width) as offset:
        bias = e.load(a.bias.floats() + (first + offset))
        totals = [e.load(sums + (r * _PANEL + offset)) + bias for r in range(rows)]
        left = count - offset
        with e.when(left >= e.width):
            finish(e, a, totals, row, Place(first + offset, None))
        with e.when(left < e.width):
            finish(e, a, totals, row, Place(first + offset, e.lanes(left)))


def _emit_products(e: Emitter, a: Args, which: _Outputs, images: _Images, sums: Value) -> None:
    """Multiply some rows of weights, read side by side, by some images."""
    (output, outputs), (row, rows) = which, images
    weights, x = a.weights.floats() + output * a.inputs, a.x.floats() + row * a.x_row
    # An addition takes four cycles: what is left of the registers goes to sums further apart.
    apart = max(1, e.isa.registers // 2 // (rows * outputs))
    products = [
        [[e.variable(0.0) for _ in range(apart)] for _ in range(rows)] for _ in range(outputs)
    ]

    def add(column: Value, k: int, mask: Value | None = None) -> None:
        values = [e.load(x + (r * a.x_row + column), mask) for r in range(rows)]
        for o, of_output in enumerate(products):
            weight = e.load(weights + (o * a.inputs + column), mask)
            for value, of_image in zip(values, of_output, strict=True):
                of_image[k].value = e.fma(value, weight, of_image[k].value)

    even = a.inputs // (apart * e.width) * (apart * e.width)
    with e.range(0, even, apart * e.width) as column:
        for k in range(apart):
            add(column + k * e.width, k)
    each_vector(e, even, a.inputs, lambda column, mask: add(column, 0, mask))
    for o, of_output in enumerate(products):
        for r, of_image in enumerate(of_output):
            total = sum((one.value for one in of_image[1:]), of_image[0].value)
            e.store(across(e, total, operator.add), sums + (r * _PANEL + o), e.lanes(1))


LINEAR = Kernel(
    "linear", ("x", "x_row", "n", "inputs", "weights", "bias", "outputs", *ENDING), _emit_linear
)
