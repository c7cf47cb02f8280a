"""Comparisons, whose answers are 1 where they hold and 0 elsewhere, and what is chosen by them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial

from ..language.compiler import Args, Kernel
from ..language.values import Value
from ..language.vectors import Emitter
from ..tape.steps import Argument, Step, View, covers, step
from .curves import even
from .unary import FIELDS, emit_each, pixels_of

Holds = Callable[[Value, Value], Value]
"""Whether two vectors compare in one way, lane by lane."""


def compared_step(x: View, other: View, y: View, *, how: str) -> Step:
    """1 where x and the other number compare so (`gt`, `ge`, `lt`, `le`, `eq`, `ne`), else 0."""
    return step(COMPARED[how], **_views(y, x=x, other=other))


def against_step(x: View, y: View, *, how: str, number: float) -> Step:
    """The same with one number for all."""
    return step(AGAINST[how], **_views(y, x=x), number=number)


def chosen_step(where: View, one: View, other: View, y: View) -> Step:
    """The number of `one` where `where` is not 0, else that of `other`."""
    return step(CHOSEN, **_views(y, x=where, one=one, other=other))


def replaced_step(x: View, where: View, y: View, *, number: float, answer: float) -> Step:
    """`number` where `where` says `answer`, 1 or 0, else x."""
    return step(REPLACED, **_views(y, x=x, where=where), number=number, answer=answer)


def _views(y: View, *, x: View, **more: View) -> dict[str, Argument]:
    given = pixels_of(x, y)
    for name, view in more.items():
        covers(view, x)
        given |= {name: view, f"{name}_pixel": view.pixel}
    return given


def _compare(e: Emitter, a: Args, x: Value, other: Value, *, how: Holds) -> Value:
    return e.select(how(x, other), even(e, 1.0), even(e, 0.0))


def _against(e: Emitter, a: Args, x: Value, *, how: Holds) -> Value:
    return _compare(e, a, x, e.broadcast(e.float_of_bits(a.number)), how=how)


def _choose(e: Emitter, a: Args, where: Value, one: Value, other: Value) -> Value:
    return e.select(where != 0.0, one, other)


def _replace(e: Emitter, a: Args, x: Value, where: Value) -> Value:
    number, answer = (e.broadcast(e.float_of_bits(one)) for one in (a.number, a.answer))
    return e.select(where == answer, number, x)


_HOLDS: dict[str, Holds] = {
    name: getattr(operator, name) for name in ("gt", "ge", "lt", "le", "eq", "ne")
}
COMPARED = {
    name: Kernel(
        f"compared_{name}",
        (*FIELDS, "other", "other_pixel"),
        partial(emit_each, of=partial(_compare, how=how), views=("x", "other")),
    )
    for name, how in _HOLDS.items()
}
AGAINST = {
    name: Kernel(
        f"against_{name}",
        (*FIELDS, "number"),
        partial(emit_each, of=partial(_against, how=how)),
    )
    for name, how in _HOLDS.items()
}
CHOSEN = Kernel(
    "chosen",
    (*FIELDS, "one", "one_pixel", "other", "other_pixel"),
    partial(emit_each, of=_choose, views=("x", "one", "other")),
)
REPLACED = Kernel(
    "replaced",
    (*FIELDS, "where", "where_pixel", "number", "answer"),
    partial(emit_each, of=_replace, views=("x", "where")),
)
