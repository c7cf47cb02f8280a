"""Run steps once, on tensors: what a single operator call does."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .steps import Scratch, Step, View, bind
from .walk import Tape, parts_each


@dataclass(frozen=True)
class Invocation:
    """Steps on named buffers, bound as far as can be: `call({"x": tensor, ...})` runs them.

    Each run has arguments and scratch of its own, so any number of threads may run the same one.
    """

    steps: tuple[Step, ...]
    threads: int
    _kernels: tuple[int, ...]
    _words: tuple[int, ...]
    _holes: tuple[tuple[int, object, int], ...]
    _scratch_bytes: int

    @classmethod
    def of(cls, steps: Sequence[Step], threads: int) -> Invocation:
        """Lay out the arguments of `steps`; the buffers of their views are names."""
        words: list[int] = []
        holes: list[tuple[int, object, int]] = []
        scratch: dict[Scratch, int] = {}
        total = 0
        for step in steps:
            for argument in step.args:
                if isinstance(argument, View):
                    holes.append((len(words), argument.buffer, 4 * argument.offset))
                elif isinstance(argument, Scratch):
                    if argument not in scratch:
                        scratch[argument] = total
                        times = threads if argument.per_thread else 1
                        total += -(-argument.bytes * times // 64) * 64
                    holes.append((len(words), None, scratch[argument]))
                words += bind([argument], lambda item: 0)
        kernels = tuple(step.kernel.address for step in steps)
        return cls(tuple(steps), threads, kernels, tuple(words), tuple(holes), total)

    def __call__(self, buffers: Mapping[str, Tensor]) -> None:
        words = (ctypes.c_int64 * len(self._words))(*self._words)
        room = torch.empty(self._scratch_bytes + 64, dtype=torch.uint8, device="cpu")
        start = -(-room.data_ptr() // 64) * 64
        for place, name, offset in self._holes:
            base = start if name is None else buffers[str(name)].data_ptr()
            words[place] = base + offset
        first = ctypes.addressof(words)
        phases = []
        for step, kernel in zip(self.steps, self._kernels, strict=True):
            phases.append([(kernel, first)])
            first += 8 * len(step.args)
        each = [parts_each(step.pieces, self.threads) for step in self.steps]
        Tape(phases, self.threads, each).run()
