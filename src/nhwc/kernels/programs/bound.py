"""A program bound to a block of memory: a call says where its inputs and results lie, and walks."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from torch import Tensor

from ..layers.copies import PLANES
from ..tape.steps import View, bind, view_of
from ..tape.walk import Tape, parts_each
from .pool import result
from .schedule import Schedule

_Places = list[tuple[int, int]]
"""Arguments that point into a buffer: the index of each, and how many bytes after its start."""


class Bound:
    """The arguments of every step of a program, bound to `size` bytes of memory from `start` on."""

    def __init__(
        self, schedule: Schedule, threads: int, offsets: dict[object, int], start: int, size: int
    ) -> None:
        self.size = size
        # The buffers that a call brings along.
        places: dict[object, _Places] = {
            view.buffer: [] for view in (*schedule.inputs, *(o.view for o in schedule.outputs))
        }
        numbers: list[int] = []
        begins = []
        for step in schedule.steps:
            begins.append(len(numbers))
            for argument in step.args:
                if isinstance(argument, View) and argument.buffer in places:
                    places[argument.buffer].append((len(numbers), 4 * argument.offset))
                numbers += bind([argument], lambda item: start + offsets.get(item, 0))
        self._args = (ctypes.c_int64 * max(len(numbers), 1))(*numbers)
        at = iter([ctypes.addressof(self._args) + 8 * begin for begin in begins])
        phases = [[(step.kernel.address, next(at)) for step in phase] for phase in schedule.phases]
        pieces = [max((step.pieces for step in phase), default=1) for phase in schedule.phases]
        self._tape = Tape(phases, threads, [parts_each(count, threads) for count in pieces])
        self._inputs = [
            _Input(
                view,
                start + offsets.get(view.buffer, 0),
                begin,
                places[view.buffer],
                _planes(schedule, begins, view),
            )
            for view, begin in zip(schedule.inputs, begins, strict=False)
        ]
        self._outputs = [
            (output.shape, output.strides, places[output.view.buffer])
            for output in schedule.outputs
        ]

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        for known, tensor in zip(self._inputs, inputs, strict=True):
            known.bring(tensor, self._args)
        results = []
        for shape, strides, places in self._outputs:
            tensor = result(shape, strides)
            _point(self._args, places, tensor.data_ptr())
            results.append(tensor)
        self._tape.run()
        return results


class _Input:
    """An input: read where it lies, or brought to its `home` by the step whose arguments begin at
    `entry`.

    A dense channels-last tensor is read where it lies. So is one that lies as N, C, H, W, if all
    its readers can: `planes` are the arguments that tell them. Strides rarely change from call to
    call, and are looked at only when they do.
    """

    def __init__(
        self, view: View, home: int, entry: int, places: _Places, planes: Sequence[int]
    ) -> None:
        self._view, self._home, self._entry = view, home, entry
        self._places, self._planes = places, planes
        self._strides: tuple[int, ...] | None = None
        self._ready = False

    def bring(self, tensor: Tensor, args: ctypes.Array[ctypes.c_int64]) -> None:
        strides, start = tensor.stride(), tensor.data_ptr()
        if strides != self._strides:
            lies = view_of(tensor)
            dense = lies is not None and lies.dense
            planes = not dense and bool(self._planes) and tensor.is_contiguous()
            self._ready, self._strides = dense or planes, strides
            layout = (0,) * 5 if self._ready else (self._view.pixels, *(*strides, 0, 0)[:4])
            for place, number in enumerate(layout, self._entry + 1):
                args[place] = number
            for place in self._planes:
                args[place] = int(planes)
        args[self._entry] = start
        _point(args, self._places, start if self._ready else self._home)


def _point(args: ctypes.Array[ctypes.c_int64], places: _Places, address: int) -> None:
    for index, offset in places:
        args[index] = address + offset


def _planes(schedule: Schedule, begins: Sequence[int], view: View) -> list[int]:
    """The places of the arguments that say whether an input lies as N, C, H, W.

    None of them if some step that reads the input has no such argument.
    """
    found = []
    for step, begin in zip(schedule.steps, begins, strict=True):
        given = step.given
        read = {
            name: argument
            for name, argument in given.items()
            if name != "y" and isinstance(argument, View) and argument.buffer is view.buffer
        }
        # Frames that a step reads as images lie apart in a volume's planes.
        known = PLANES in given and given["n"] == view.shape[0]
        if read and (read != {"x": view} or not known):
            return []
        if read:
            found.append(begin + step.kernel.fields.index(PLANES))
    return found
