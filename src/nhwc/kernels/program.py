"""A whole model as one call: a tape of kernels over memory that is planned once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..formats import Format, strides_of
from . import threads
from .arena import LINE, Lifetime, place
from .bound import Bound
from .copies import input_step
from .later import foreseen
from .pooled import pooled
from .steps import Scratch, Step, View
from .tape import WALK


@dataclass(frozen=True)
class Output:
    """A result: where it is computed, and the shape and format of the tensor that holds it."""

    view: View
    shape: tuple[int, ...]
    format: Format

    @property
    def strides(self) -> tuple[int, ...]:
        """Those of the tensor."""
        return strides_of(self.shape, self.format if len(self.shape) == 4 else Format.CONTIGUOUS)


class Program:
    """Runs the recorded steps on new inputs: `program(x)` returns the list of outputs.

    Several threads may call at once: each call takes a block of memory of its own from `pool`,
    which keeps it for later calls. The thread count is torch's at the time of the call.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        inputs: Sequence[View],
        outputs: Sequence[Output],
        pool: Pool | None = None,
    ):
        # The first steps bring inputs into channels last; a call skips those it does not need.
        entries = [input_step(view) for view in inputs]
        results = [output.view for output in outputs]
        self.steps = (*entries, *foreseen(pooled(steps, results)))
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.barriers = _barriers(self.steps)
        self._phases = _phases(self.barriers)
        self._pool = Pool() if pool is None else pool
        self._key = object()
        # Compiled here, so that no call has to wait for it.
        for kernel in {step.kernel.name: step.kernel for step in self.steps}.values():
            _ = kernel.address
        _ = WALK.address, threads.ENTRY.address

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        inputs = [_as_image(tensor) for tensor in tensors]
        self._check(inputs)
        count = torch.get_num_threads()
        block = self._pool.take(count)
        try:
            if self._key not in block.bound:
                offsets, size = self._place(count)
                block.grow(size)
                block.bound[self._key] = Bound(self, count, offsets, block.start)
            return block.bound[self._key].run(inputs)
        finally:
            self._pool.put(count, block)

    def _check(self, inputs: Sequence[Tensor]) -> None:
        if len(inputs) != len(self.inputs):
            raise InputError(f"the program takes {len(self.inputs)} inputs; got {len(inputs)}.")
        for number, (tensor, view) in enumerate(zip(inputs, self.inputs, strict=True)):
            n, c, h, w = view.shape
            good = tensor.shape == view.shape or (h == w == 1 and tensor.shape == (n, c))
            if not good or tensor.dtype is not torch.float32 or not tensor.is_cpu:
                raise InputError(
                    f"input {number} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}; "
                    f"the program was recorded for {view.shape} torch.float32 on cpu."
                )
            if tensor.requires_grad and torch.is_grad_enabled():
                raise InputError(
                    f"input {number} requires a gradient, and a program has none. Call it under "
                    "torch.inference_mode(), or train the model it was made from."
                )

    def _place(self, threads: int) -> tuple[dict[object, int], int]:
        """The offset of each buffer and scratch in the arena, and the arena's size."""
        outside = {id(output.view.buffer) for output in self.outputs}
        lives: dict[object, Lifetime] = {}
        for step, phase in zip(self.steps, self._phases, strict=True):
            for argument in step.args:
                if isinstance(argument, View):
                    item = argument.buffer
                    size = 4 * argument.pixels * argument.pixel
                elif isinstance(argument, Scratch):
                    item = argument
                    size = argument.bytes * (threads if argument.per_thread else 1)
                else:
                    continue
                if id(item) not in outside:
                    known = lives.get(item, Lifetime(size, phase, phase))
                    lives[item] = Lifetime(size, known.first, phase)
        offsets, total = place(list(lives.values()))
        return dict(zip(lives, offsets, strict=True)), total


def _as_image(tensor: Tensor) -> Tensor:
    """Rows of channels, each in a batch, as images one pixel wide; others as they are."""
    return tensor.transpose(1, 2).unsqueeze(3) if tensor.dim() == 3 else tensor


class Pool:
    """Memory for programs that run one after the other, or at once in several threads."""

    def __init__(self) -> None:
        self._idle: dict[int, deque[_Block]] = {}

    def take(self, threads: int) -> _Block:
        """A block that nobody else has until it is put back."""
        # deque's append and pop are atomic, so no lock is held, and none survives a fork.
        try:
            return self._idle.setdefault(threads, deque()).pop()
        except IndexError:
            return _Block()

    def put(self, threads: int, block: _Block) -> None:
        self._idle[threads].append(block)


class _Block:
    """Memory, as much as the largest program needs, and the programs that are bound to it."""

    def __init__(self) -> None:
        self.bound: dict[object, Bound] = {}
        self._memory = torch.empty(0, dtype=torch.uint8)

    def grow(self, size: int) -> None:
        if size + LINE > len(self._memory):
            self.bound = {}
            self._memory = torch.empty(size + LINE, dtype=torch.uint8)

    @property
    def start(self) -> int:
        return -(-self._memory.data_ptr() // LINE) * LINE


def _barriers(steps: Sequence[Step]) -> tuple[bool, ...]:
    """After which steps all threads must meet: only where a later step would disturb one."""
    barriers = [False] * len(steps)
    together: list[Step] = []
    for index, step in enumerate(steps):
        if index and any(step.disturbs(other) for other in together):
            barriers[index - 1] = together[-1].barrier
            together = []
        together.append(step)
    return tuple(barriers)


def _phases(barriers: Sequence[bool]) -> list[int]:
    """The number of barriers before each step: steps of one phase may run at the same time."""
    return [sum(barriers[:index]) for index in range(len(barriers))]
