"""The steps of a program in order, before any memory is bound to them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

from ...formats import Format, strides_of
from ..tape.arena import Lifetime, place
from ..tape.steps import Scratch, Step, View


@dataclass(frozen=True)
class Output:
    """A result: where it is computed, and the shape and format of the tensor that holds it."""

    view: View
    shape: tuple[int, ...]
    format: Format

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of the tensor."""
        last = len(self.shape) in (4, 5)
        return strides_of(self.shape, self.format if last else Format.CONTIGUOUS)


@dataclass(frozen=True)
class Schedule:
    """Steps in the order in which they run, the inputs they read and the outputs they write."""

    steps: tuple[Step, ...]
    inputs: tuple[View, ...]
    outputs: tuple[Output, ...]

    @cached_property
    def phases(self) -> tuple[tuple[Step, ...], ...]:
        """The steps, cut where threads must meet: only where the next disturbs one before.

        A step disturbs another if it writes what the other uses, or uses what it writes.
        """
        # A step may be apart from its neighbour and still disturb one before that: so all steps of
        # the phase are asked.
        found: list[list[Step]] = [[]]
        for step in self.steps:
            if any(step.disturbs(other) for other in found[-1]):
                found.append([])
            found[-1].append(step)
        return tuple(map(tuple, found))

    def places(self, threads: int) -> tuple[dict[object, int], int]:
        """The offset of each buffer and scratch in the arena, and the arena's size."""
        lives = self.lives(threads)
        offsets, total = place(list(lives.values()))
        return dict(zip(lives, offsets, strict=True)), total

    def lives(self, threads: int) -> dict[object, Lifetime]:
        """How large each buffer and scratch in the arena is, and when it is used."""
        outside = {id(output.view.buffer) for output in self.outputs}
        lives: dict[object, Lifetime] = {}
        for number, phase in enumerate(self.phases):
            for argument in itertools.chain.from_iterable(step.args for step in phase):
                if isinstance(argument, View):
                    item, end = argument.buffer, argument.offset + argument.floats
                    size = 4 * max(argument.pixels * argument.pixel, end)
                elif isinstance(argument, Scratch):
                    item = argument
                    size = argument.bytes * (threads if argument.per_thread else 1)
                else:
                    continue
                if id(item) not in outside:
                    # Some views count a part of a buffer as pixels of fewer numbers.
                    known = lives.get(item, Lifetime(size, number, number))
                    lives[item] = Lifetime(max(size, known.bytes), known.first, number)
        return lives
