"""Moving tokens: pieces of numbers are copied from where one table says to where another says.

Permutes, windows, rolls, padding, slices and concatenations of tokens are all this. The numbers of
a piece lie side by side behind. Before they do so too, mostly: a row, or the channels of a head. Or
all are one, which is repeated; or they lie equally far apart, as a column that becomes a row:

    before   a0 b0 c0 .. a1 b1 c1 ..      behind   a0 a1 a2 ..    pieces of numbers that lie a pixel
             a2 b2 c2 ..                           b0 b1 b2 ..    apart, and begin side by side

Where as many columns begin side by side as a vector holds, blocks of them are turned in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..language.compiler import Args, Kernel
from ..language.loops import each_vector
from ..language.values import Value
from ..language.vectors import Emitter
from ..tape.steps import Step, View, held, step
from .copies import CHUNK, transposed


class Piece(NamedTuple):
    """How many floats all pieces have, how far apart these lie in the source, and of how many
    neighbouring pieces the sources begin side by side."""

    floats: int
    apart: int = 1
    beside: int = 1


def gather_step(x: View, y: View, sources: Tensor, targets: Tensor, floats: int = 1) -> Step:
    """Copy pieces of `floats` numbers from `sources` in x to `targets` in y.

    Both count floats from where the view begins. A source of -1 stands for zeros.
    """
    piece = pieces_of(sources, targets) if floats == 1 else Piece(floats)
    begins = slice(None, None, piece.floats // floats)
    sources, targets = sources[begins], targets[begins]
    return step(
        GATHER,
        x=x,
        y=y,
        sources=held(sources, x.floats, behind=(piece.floats - 1) * piece.apart + 1, signs=1),
        targets=held(targets, y.floats, behind=piece.floats),
        pieces=sources.numel(),
        floats=piece.floats,
        stride=piece.apart,
        beside=piece.beside,
    )


def pieces_of(sources: Tensor, targets: Tensor) -> Piece:
    """The largest pieces in which all these numbers can be copied.

    >>> import torch
    >>> pieces_of(torch.tensor([0, 1, 4, 5]), torch.arange(4))
    Piece(floats=2, apart=1, beside=1)
    >>> pieces_of(torch.arange(6).view(3, 2).t().flatten(), torch.arange(6))
    Piece(floats=3, apart=2, beside=2)
    """
    source, target = sources.numpy(), targets.numpy()
    lies, steps = source >= 0, np.diff(source)
    pairs = lies[1:] & lies[:-1]
    first = int(pairs.argmax()) if len(pairs) else 0
    apart = max(int(steps[first]), 0) if len(pairs) and pairs[first] else 1
    alike = np.where(pairs, steps == apart, ~(lies[1:] | lies[:-1]))
    floats = runs_of(alike & (np.diff(target) == 1))
    if floats == 1:
        return Piece(1)
    beside = runs_of(np.diff(source[::floats]) == 1) if lies.all() else 1
    return Piece(floats, apart, beside)


def runs_of(together: np.ndarray) -> int:
    """The most numbers that all runs can have whose neighbours are `together`."""
    ends = np.append(np.flatnonzero(~together), len(together)) + 1
    return int(np.gcd.reduce(ends))


def _emit(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    turned = (a.beside >= e.width) & (a.floats >= e.width)
    each = partial(_each, e, a, thread, threads)
    e.branch(
        a.stride == 1,
        lambda: e.branch(a.floats == 1, partial(each, _number), partial(each, _copied)),
        lambda: e.branch(
            turned,
            lambda: _emit_blocks(e, a, thread, threads),
            lambda: e.branch(a.stride == 0, partial(each, _repeated), partial(each, _column)),
        ),
    )


_Write = Callable[[Emitter, Args, Value, Value], object]


def _each(e: Emitter, a: Args, thread: Value, threads: Value, write: _Write) -> None:
    """Write each piece, which is given as what is found, or is zeros."""
    begin, end = e.share(a.pieces, thread, threads)
    with e.range(begin, end) as piece:
        source, to = _ends(e, a, piece)
        e.branch(
            source < 0,
            lambda: each_vector(
                e, 0, a.floats, lambda c, mask: e.store(e.vector(0.0), to + c, mask)
            ),
            lambda: write(e, a, a.x.floats() + source, to),
        )


def _number(e: Emitter, a: Args, source: Value, to: Value) -> None:
    """A shuffle of channels, or a signal, has no two numbers side by side."""
    e.write(e.read(source), to)


def _copied(e: Emitter, a: Args, source: Value, to: Value) -> None:
    each_vector(e, 0, a.floats, lambda c, mask: e.store(e.load(source + c, mask), to + c, mask))


def _repeated(e: Emitter, a: Args, source: Value, to: Value) -> None:
    one = e.broadcast(e.read(source))
    each_vector(e, 0, a.floats, lambda c, mask: e.store(one, to + c, mask))


def _column(e: Emitter, a: Args, source: Value, to: Value) -> None:
    _emit_numbers(e, a, source, to, e.i64(0), a.floats)


def _emit_blocks(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    long = CHUNK * e.width
    chunks, blocks = (a.floats + (long - 1)) // long, (a.beside + (e.width - 1)) // e.width
    begin, end = e.share(a.pieces // a.beside * blocks * chunks, thread, threads)
    with e.range(begin, end) as unit:
        block, first = unit // chunks, unit % chunks * long
        within = block % blocks * e.width
        piece = block // blocks * a.beside + within
        last, count = e.min(first + long, a.floats), e.min(a.beside - within, e.i64(e.width))
        done = e.variable(0)
        done.value = first
        with e.when(count == e.width):
            done.value = first + (last - first) // e.width * e.width
            source, _ = _ends(e, a, piece)
            with e.range(first, done.value, e.width) as number:
                column = a.x.floats() + (source + number * a.stride)
                rows = [e.load(column + a.stride * row) for row in range(e.width)]
                for row, vector in enumerate(transposed(e, rows)):
                    _, to = _ends(e, a, piece + row)
                    e.store(vector, to + number)
        with e.when(done.value < last), e.range(0, count) as column:
            source, to = _ends(e, a, piece + column)
            _emit_numbers(e, a, a.x.floats() + source, to, done.value, last)


def _emit_numbers(e: Emitter, a: Args, source: Value, to: Value, first: Value, last: Value) -> None:
    with e.range(first, last) as number:
        e.write(e.read(source + number * a.stride), to + number)


def _ends(e: Emitter, a: Args, piece: Value) -> tuple[Value, Value]:
    """The place in x where a piece begins, and where it goes."""
    source, target = (e.read(part.integers() + piece) for part in (a.sources, a.targets))
    return source, a.y.floats() + target


GATHER = Kernel(
    "gather", ("x", "y", "sources", "targets", "pieces", "floats", "stride", "beside"), _emit
)
