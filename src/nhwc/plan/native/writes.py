"""A tensor with another in the place of a part of it, which is what `x[key] = value` makes.

Often nothing is copied. A part of the same buffer, as the shifts of video models put in, changes
where the numbers lie, and so does a part of zeros, or one that is put into these:

    out = torch.zeros_like(x)        nowhere
    out[:, 1:] = x[:, :-1]           the numbers of x, a frame later, and zeros

A part of another buffer is copied into a new one, with what is left of the whole.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from ...graph import bound, filled
from ...kernels.programs.builder import Builder
from ...kernels.programs.moved import Moved, in_one_buffer, place, room_like
from ..following import is_blank
from ..implementation import Implementation
from ..specs import nodes_in
from .calls import OperatorCall
from .rows import as_it_lies

_NAMES = {
    "slice_scatter": ("input", "src", "dim", "start", "end", "step"),
    "select_scatter": ("input", "src", "dim", "index"),
}


def put_in(call: OperatorCall) -> Implementation | None:
    """`slice_scatter`, or `select_scatter`, whose part lacks the dimension."""
    record, layer = call.record, call.layer
    fixed = lambda one: record.values[one] if one in record.fixed else one
    given = filled(bound(call.node, _NAMES[call.name]), fixed)
    whole, part = given.get("input"), given.get("src")
    if not {whole, part} <= {*layer.inputs} or len(nodes_in(given)) > 2:
        return None
    blank = record.is_given(whole) and _is_of_blank(whole)
    shape = call.out.shape
    dim = given.get("dim", 0) % len(shape)
    at = range(shape[dim])
    if "index" in given:
        at = at[given["index"] :][:1]
    else:
        at = at[given.get("start") : given.get("end") : given.get("step", 1)]
    order = [layer.inputs.index(one) for one in (whole, part)]

    def emit(builder: Builder, constants: None, *inputs: Moved) -> Moved:
        whole, part = (inputs[number] for number in order)
        if blank:
            whole = Moved(part.buffer, torch.full_like(whole.where, -1))
        if "index" in given:
            part = Moved(part.buffer, part.where.unsqueeze(dim))
        buffer = in_one_buffer((whole, part))
        if buffer is not None:
            return Moved(buffer, whole.where.index_copy(dim, torch.tensor(at), part.where))
        made = room_like(builder, part, shape)
        for kept in _around(at, shape[dim]):
            place(builder, _some(whole, dim, kept), _some(made, dim, kept))
        place(builder, part, _some(made, dim, at))
        return made

    return as_it_lies(record, layer, emit)


def _is_of_blank(node: fx.Node) -> bool:
    """Whether this constant, or what it is a part of, is nothing but zeros."""
    while node.target in (operator.getitem, "select"):
        [node, *_] = node.all_input_nodes
    return is_blank(node)


def _around(at: range, length: int) -> list[Sequence[int]]:
    """The places of a dimension before, between and behind those of `at`, as far as there are."""
    between = [index for index in range(at[0], at[-1]) if index not in at]
    return [one for one in (range(at[0]), between, range(at[-1] + 1, length)) if one]


def _some(x: Moved, dim: int, at: Sequence[int]) -> Moved:
    return Moved(x.buffer, x.where.index_select(dim, torch.tensor(at)))
