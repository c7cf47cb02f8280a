"""An LSTM or a GRU: for each of its layers one product for all steps, then the steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...graph.modules.leaves import runs_hooks
from ...kernels.convolutions.conv import ConvKernel
from ...kernels.convolutions.spec import ConvSpec
from ...kernels.layers.recurrent import GRU, LSTM, RecurrentCell, Sequences, recurrent_steps
from ...kernels.programs.builder import Buffer, Builder
from ...kernels.programs.moved import Moved, as_rows, settled_rows
from ..implementation import Implementation
from .calls import OperatorCall
from .rows import as_it_lies


def recurrent(call: OperatorCall) -> Implementation | None:
    """Our kernel for the sequence that an LSTM or a GRU makes, whose projections torch keeps."""
    module = call.module.recurrent
    if module.proj_size or runs_hooks(module):
        return None
    order = _order(call.seen(0).shape, batch_first=module.batch_first)
    sides = call.seen(0).shape[:-1]

    def emit(builder: Builder, constants: None, x: Moved) -> Moved:
        for number in range(module.num_layers):
            states = _states(builder, settled_rows(builder, x), _layer_of(module, number), order)
            x = as_rows(states, (*sides, states.shape[1]))
        return x

    return as_it_lies(call.record, call.layer, emit)


def _order(shape: tuple[int, ...], *, batch_first: bool) -> Sequences:
    if len(shape) == 2:
        return Sequences(1, shape[0], shape[0], 1)
    if batch_first:
        return Sequences(shape[0], shape[1], shape[1], 1)
    return Sequences(shape[1], shape[0], 1, shape[1])


class _Layer(NamedTuple):
    """A layer of all directions: what it makes of a step's input, and of the states before."""

    cell: RecurrentCell
    weight: Tensor
    bias: Tensor | None
    states: Tensor
    states_bias: Tensor | None


def _layer_of(module: nn.RNNBase, number: int) -> _Layer:
    cell = LSTM if isinstance(module, nn.LSTM) else GRU
    ends = [f"_l{number}", f"_l{number}_reverse"][: 1 + module.bidirectional]

    def each(name: str) -> list[Tensor]:
        return [getattr(module, f"{name}{end}").detach() for end in ends]

    weight = torch.cat([cell.by_unit(one) for one in each("weight_ih")])
    states = cell.pack(each("weight_hh"))
    if not module.bias:
        return _Layer(cell, weight, None, states, None)
    biases = list(zip(each("bias_ih"), each("bias_hh"), strict=True))
    if cell is LSTM:
        bias = torch.cat([cell.by_unit(one + other) for one, other in biases])
        return _Layer(cell, weight, bias, states, None)
    # What a GRU takes of the old state for the new one is reset behind its bias.
    hidden = module.hidden_size
    late = torch.cat([other[2 * hidden :] for _, other in biases])
    soon = [one + F.pad(other[: 2 * hidden], (0, hidden)) for one, other in biases]
    bias = torch.cat([cell.by_unit(one) for one in soon])
    return _Layer(cell, weight, bias, states, late)


def _states(builder: Builder, x: Buffer, layer: _Layer, order: Sequences) -> Buffer:
    """Add the steps of one layer on the rows of `x`; its states are rows in the same order."""
    rows, width = order.sequences * order.steps, x.shape[1]
    columns, states = len(layer.weight), layer.states.shape[0] * layer.states.shape[2]
    spec = ConvSpec(rows, width, 1, 1, columns, 1, 1, has_bias=layer.bias is not None)
    product = ConvKernel("pointwise", True, spec)
    packed = product.pack(layer.weight[:, :, None, None], layer.bias)
    gates, y = builder.buffer((rows, columns)), builder.buffer((rows, states))
    builder.add(lambda x, y: product.steps(x.as_images(rows, 1, 1), y, packed), x, gates)
    more: dict[str, Any] = {"weights": layer.states, "bias": layer.states_bias}
    builder.add(lambda x, y: recurrent_steps(x, y, layer.cell, order, **more), gates, y)
    return y
