"""Moving tokens: pieces of rows are copied from where one table says to where another says.

Permutes, windows, rolls, padding, slices and concatenations of tokens are all this. A piece is as
many floats as lie side by side both before and after, mostly a row or the channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..language.compiler import Args, Kernel
from ..language.loops import each_vector
from ..language.values import Value
from ..language.vectors import Emitter
from ..tape.steps import Step, View, held, step


def gather_step(x: View, y: View, sources: Tensor, targets: Tensor, floats: int) -> Step:
    """Copy pieces of `floats` numbers from `sources` in x to `targets` in y.

    Both count floats from where the view begins. A source of -1 stands for zeros.
    """
    return step(
        GATHER,
        x=x,
        y=y,
        sources=held(sources, x.floats, behind=floats, signs=1),
        targets=held(targets, y.floats, behind=floats),
        pieces=sources.numel(),
        floats=floats,
    )


def _emit(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    begin, end = e.share(a.pieces, thread, threads)
    e.branch(
        a.floats == 1,
        lambda: _each(e, a, begin, end, _emit_number),
        lambda: _each(e, a, begin, end, _emit_piece),
    )


def _each(e: Emitter, a: Args, begin: Value, end: Value, copy: Callable[..., None]) -> None:
    with e.range(begin, end) as piece:
        source, target = (e.read(part.integers() + piece) for part in (a.sources, a.targets))
        copy(e, a, source, a.y.floats() + target)


def _emit_number(e: Emitter, a: Args, source: Value, to: Value) -> None:
    """A shuffle of channels, or a signal, has no two numbers side by side."""
    e.write(0.0, to)
    with e.when(source >= 0):
        e.write(e.read(a.x.floats() + source), to)


def _emit_piece(e: Emitter, a: Args, source: Value, to: Value) -> None:
    def copy(c: Value, mask: Value | None) -> None:
        e.store(e.load(a.x.floats() + (source + c), mask), to + c, mask)

    def clear(c: Value, mask: Value | None) -> None:
        e.store(e.vector(0.0), to + c, mask)

    e.branch(
        source < 0,
        lambda: each_vector(e, 0, a.floats, clear),
        lambda: each_vector(e, 0, a.floats, copy),
    )


GATHER = Kernel("gather", ("x", "y", "sources", "targets", "pieces", "floats"), _emit)
