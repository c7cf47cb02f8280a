"""An LSTM or a GRU: the part that goes from one step of a sequence to the next.

What a sequence's steps add to the gates is one product, made before, for all steps at once. What
the state adds is a product for each step, in which each number of the weights is used once for each
sequence: it takes as long as these weights take from the cache. So gates, state and result are made
together, for as many units as a vector holds:

    step t of some sequences             weights of the state, for 8 units of an LSTM
                                              i        f        g        o
    state t-1  h0 h1 h2 ...       h0   [wwwwwwww][wwwwwwww][wwwwwwww][wwwwwwww]
                  x ------------> h1   [wwwwwwww][wwwwwwww][wwwwwwww][wwwwwwww]
                                         + gates of step t
                                       [iiiiiiii][ffffffff][gggggggg][oooooooo]  --->  8 of state t

The state is the result of the step before, and is read where it was written. Threads take sequences
and directions, and go through all steps alone. Where there are fewer of these than threads, each
step is one of the tape, which has threads wait for each other, and they share out units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import InputError
from ..language import isa as isas
from ..language.compiler import Args, Kernel
from ..language.isa import Isa
from ..language.loops import emit_vectors
from ..language.values import INT, POINTER, Value
from ..language.vectors import Emitter
from ..product.weights import pack_bias
from ..tape.pages import room, shared
from ..tape.steps import Argument, Scratch, Step, View, step
from .curves import sigmoid, tanh

_APART = 8
"""Sums that are added to in turns: a sum can be added to again only some cycles later."""
_MOST_STEPS = 512
"""The longest sequence whose steps are steps of the tape."""
_WORTH_SHARING = 1 << 17
"""The multiply-adds of a step that are worth a thread's waiting for another."""

FIELDS = (
    *("x", "x_row", "y", "y_row", "weights", "hidden", "directions"),
    *("sequences", "sequence_rows", "steps", "step_rows", "first_step", "last_step", "cuts"),
)


class Sequences(NamedTuple):
    """How the rows of sequences lie: how many rows it is to the next sequence, and step."""

    sequences: int
    steps: int
    sequence_rows: int
    step_rows: int


@dataclass(frozen=True)
class RecurrentCell:
    """What makes a state of gates: its kernel, and how many gates it has."""

    kernel: Kernel
    gates: int

    def by_unit(self, matrix: Tensor) -> Tensor:
        """Rows, of one gate after another, as vectors of units, filled up, their gates side by
        side."""
        isa, (hidden, wide) = isas.host(), (len(matrix) // self.gates, matrix[0].numel())
        apart = matrix.detach().float().reshape(self.gates, hidden, wide)
        filled = F.pad(apart, (0, 0, 0, isa.padded(hidden) - hidden))
        vectors: Tensor = filled.unflatten(1, (-1, isa.width)).transpose(0, 1)
        return vectors.reshape(-1, *matrix.shape[1:])

    def pack(self, directions: Sequence[Tensor]) -> Tensor:
        """The weights of the states of all directions, as the kernel reads them."""
        wide = self.gates * isas.host().width
        ordered = [self.by_unit(one).unflatten(0, (-1, wide)) for one in directions]
        states_first = torch.stack(ordered).transpose(2, 3)
        packed = room(states_first.numel())
        packed.view(states_first.shape).copy_(states_first)
        return shared(packed).view(states_first.shape)


def recurrent_steps(
    x: View,
    y: View,
    cell: RecurrentCell,
    order: Sequences,
    weights: Tensor,
    bias: Tensor | None = None,
) -> list[Step]:
    """The states of sequences, `weights` as `cell.pack` has them; `x` is what is added to gates.

    Each direction has a part of the channels of `x` and `y`. `bias` is what a GRU adds to the new
    state's share of the old one, for each unit of each direction.
    """
    directions, groups, hidden, wide = weights.shape
    isa = isas.host()
    units = groups * isa.width
    rows = order.sequences * order.steps
    if x.pixels != rows or y.pixels != rows or wide != cell.gates * isa.width:
        raise InputError(
            f"sequences of {order} do not fit {x.shape} and {y.shape}. Report this model."
        )
    if x.shape[1] != directions * groups * wide or y.shape[1] != directions * hidden:
        raise InputError(f"{weights.shape} do not fit {x.shape} and {y.shape}. Report this model.")
    given: dict[str, Argument] = {
        "x": x,
        "x_row": x.pixel,
        "y": y,
        "y_row": y.pixel,
        "weights": weights,
        "hidden": hidden,
        "directions": directions,
        "sequences": order.sequences,
        "sequence_rows": order.sequence_rows,
        "steps": order.steps,
        "step_rows": order.step_rows,
    }
    if cell is LSTM:
        given["cells"] = Scratch(4 * order.sequences * directions * units)
    else:
        given["bias"] = pack_bias(bias, hidden, directions, isa)
    parts, threads = directions * _blocks(order.sequences, cell, isa), torch.get_num_threads()
    large = order.sequences * wide * groups * hidden >= _WORTH_SHARING
    if parts >= threads or order.steps > _MOST_STEPS or not large:
        return [step(cell.kernel, first_step=0, last_step=order.steps, cuts=1, **given)]
    cuts = min(groups, -(-threads // parts))
    return [
        step(cell.kernel, first_step=one, last_step=one + 1, cuts=cuts, **given)
        for one in range(order.steps)
    ]


def _most(gates: int, isa: Isa) -> int:
    """How many sequences are computed together: their sums stay in registers."""
    return (isa.registers - gates - 1) // gates


def _blocks(sequences: int, cell: RecurrentCell, isa: Isa) -> int:
    return -(-sequences // _most(cell.gates, isa))


@dataclass(frozen=True)
class _Units:
    """A vector of units of a direction, at a step, in `rows` sequences: where their gates, states
    and weights lie.

    `before` is where the state of the step before begins, that of the first sequence; there is none
    if not `later`. `first` is the first unit, and `vector` the number of the vector among those of
    all directions.
    """

    gates: Value
    before: Value
    after: Value
    later: Value
    sequence: Value
    rows: Value
    first: Value
    vector: Value


Make = Callable[[Emitter, Args, _Units, list[Value], list[Value], Value], Value]
"""The new state of a vector of units of a sequence; the lists are its gates and what the state
before adds to them."""


def _emit(e: Emitter, a: Args, thread: Value, threads: Value, *, gates: int, make: Make) -> None:
    most = _most(gates, e.isa)
    blocks, groups = (a.sequences + (most - 1)) // most, emit_vectors(e, a.hidden)
    begin, end = e.share(a.directions * blocks * a.cuts, thread, threads)
    sums = e.stack(most * gates * e.width)
    with e.range(begin, end) as part:
        direction, block = part // a.cuts // blocks, part // a.cuts % blocks
        sequence = block * most
        first, last = e.share(groups, part % a.cuts, a.cuts)
        with e.range(a.first_step, a.last_step) as number, e.range(first, last) as group:
            later = number > 0
            now = e.select(direction == 0, number, a.steps - 1 - number)
            # The first step reads no state; what it points to must exist all the same.
            past = now + e.select(later, e.select(direction == 0, e.i64(-1), e.i64(1)), e.i64(0))
            vector, row = direction * groups + group, sequence * a.sequence_rows
            units = _Units(
                gates=a.x.floats() + (row + now * a.step_rows) * a.x_row + vector * gates * e.width,
                before=a.y.floats() + (row + past * a.step_rows) * a.y_row + direction * a.hidden,
                after=a.y.floats() + (row + now * a.step_rows) * a.y_row + direction * a.hidden,
                later=later,
                sequence=sequence,
                rows=e.min(a.sequences - sequence, e.i64(most)),
                first=group * e.width,
                vector=vector,
            )
            _emit_products(e, a, units, gates, sums)
            _emit_states(e, a, units, gates, sums, make)


def _emit_products(e: Emitter, a: Args, units: _Units, gates: int, sums: Value) -> None:
    """What the state before adds to the gates."""
    depth = e.select(units.later, a.hidden, e.i64(0))
    weights = a.weights.floats() + units.vector * a.hidden * gates * e.width
    given = (units.before, a.sequence_rows * a.y_row, weights, depth, sums)
    kinds = (POINTER, INT, POINTER, INT, POINTER)
    cases = {}
    for count in range(1, _most(gates, e.isa) + 1):
        product = partial(_emit_product, rows=count, gates=gates)
        cases[count] = partial(e.function(f"product_of_{count}", kinds, product), *given)
    e.switch(units.rows, cases)


def _emit_product(
    e: Emitter,
    state: Value,
    state_apart: Value,
    weights: Value,
    depth: Value,
    sums: Value,
    *,
    rows: int,
    gates: int,
) -> None:
    apart = max(1, _APART // (rows * gates))
    lines = [[[e.variable(0.0) for _ in range(apart)] for _ in range(gates)] for _ in range(rows)]

    def add(k: Value, turn: int) -> None:
        row = weights + k * (gates * e.width)
        each = [e.load(row + gate * e.width) for gate in range(gates)]
        for i, line in enumerate(lines):
            factor = e.read(state + (i * state_apart + k))
            for turns, weight in zip(line, each, strict=True):
                turns[turn].value = e.fma(factor, weight, turns[turn].value)

    even = depth // apart * apart
    with e.range(0, even, apart) as k:
        for turn in range(apart):
            add(k + turn, turn)
    if apart > 1:
        with e.range(even, depth) as k:
            add(k, 0)
    for i, line in enumerate(lines):
        for gate, turns in enumerate(line):
            total = sum((one.value for one in turns[1:]), turns[0].value)
            e.store(total, sums + (i * gates + gate) * e.width)


def _emit_states(e: Emitter, a: Args, units: _Units, gates: int, sums: Value, make: Make) -> None:
    left = a.hidden - units.first
    with e.range(0, units.rows) as row:
        start = units.gates + row * a.sequence_rows * a.x_row
        given = [e.load(start + gate * e.width) for gate in range(gates)]
        added = [e.load(sums + (row * gates + gate) * e.width) for gate in range(gates)]
        state = make(e, a, units, given, added, row)
        place = units.after + (row * a.sequence_rows * a.y_row + units.first)
        with e.when(left >= e.width):
            e.store(state, place)
        with e.when(left < e.width):
            e.store(state, place, e.lanes(left))


def _lstm(
    e: Emitter, a: Args, units: _Units, given: list[Value], added: list[Value], row: Value
) -> Value:
    taken, kept, new, shown = (one + more for one, more in zip(given, added, strict=True))
    place = (units.sequence + row) * a.directions * emit_vectors(e, a.hidden) + units.vector
    held = a.cells.floats() + place * e.width
    old = e.select(units.later, e.load(held), e.vector(0.0))
    cell = e.fma(sigmoid(e, kept), old, sigmoid(e, taken) * tanh(e, new))
    e.store(cell, held)
    return sigmoid(e, shown) * tanh(e, cell)


def _gru(
    e: Emitter, a: Args, units: _Units, given: list[Value], added: list[Value], row: Value
) -> Value:
    reset, kept = (sigmoid(e, given[gate] + added[gate]) for gate in (0, 1))
    bias = e.load(a.bias.floats() + units.vector * e.width)
    new = tanh(e, e.fma(reset, added[2] + bias, given[2]))
    before = units.before + (row * a.sequence_rows * a.y_row + units.first)
    old = e.select(units.later, e.load(before, e.lanes(a.hidden - units.first)), e.vector(0.0))
    return e.fma(kept, old - new, new)


_OF_LSTM = Kernel("lstm", (*FIELDS, "cells"), partial(_emit, gates=4, make=_lstm))
_OF_GRU = Kernel("gru", (*FIELDS, "bias"), partial(_emit, gates=3, make=_gru))

LSTM, GRU = RecurrentCell(_OF_LSTM, 4), RecurrentCell(_OF_GRU, 3)
