"""A whole model as one call: a tape of kernels over memory that is planned once.

From recorded steps to a call:

    Builder      the steps of a model on symbolic buffers, in the order in which they run
       |         pooled: a convolution pools what only a pooling reads
       |         endings: what computes also adds and activates
       |         prologues: a product normalizes, or gates, the pixels that it packs
       |         foreseen: a product asks for the weights of the linear layer behind it
       |         packed apart: of few pixels all are packed before any is multiplied
    Schedule     all steps, the inputs' first; where threads must meet; where buffers lie
       |         placed for a number of threads, since scratch memory is of each thread
    Bound        every argument a number: addresses in one block of memory, once per block
       |         a call writes the addresses of its inputs and results into the arguments
    Tape         walked by all threads

The order matters. Steps are joined before phases are found, as there are fewer of them then; phases
are found before buffers are placed, since the steps of a phase may run at the same time, and their
buffers live together; and the places become addresses when a call gets a block of memory for the
first time.

Blocks are taken from a pool for the time of a call, so several threads may call one program, and
programs that run one after the other, as in a model that is partly torch's, use the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import InputError
from ..convolutions.direct import DIRECT, packed_apart
from ..language.compiler import Kernel, Kernels
from ..layers.copies import input_step
from ..tape import threads
from ..tape.steps import Step, View
from ..tape.walk import WALK
from .bound import Bound
from .endings import with_endings
from .later import foreseen
from .pool import Pool, check_guards, is_from_nothing
from .pooled import pooled
from .prologues import with_prologues
from .schedule import Output, Schedule


def _packed_apart(steps: Sequence[Step], threads: int) -> list[Step]:
    found: list[Step] = []
    for step in steps:
        found += packed_apart(step, threads) if step.kernel is DIRECT else (step,)
    return found


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
        fewer = with_prologues(with_endings(pooled(steps, results), results), results)
        count = torch.get_num_threads()
        ordered = (*entries, *_packed_apart(foreseen(fewer), count))
        self.schedule = Schedule(ordered, tuple(inputs), tuple(outputs))
        self._pool = Pool() if pool is None else pool
        # Compiled here, so that no call has to wait for it.
        # What other programs most likely share comes last: their threads compile it meanwhile.
        own = {step.kernel.name: step.kernel for step in ordered}
        called = {one for step in ordered for one in step.args if isinstance(one, Kernels)}
        wanted: list[Kernel | Kernels] = [*own.values(), WALK, threads.ENTRY, *called]
        for kernel in wanted:
            _ = kernel.address

    def __call__(self, *tensors: Tensor) -> list[Tensor]:
        wanted = self.schedule.inputs
        if len(tensors) != len(wanted):
            raise InputError(f"the program takes {len(wanted)} inputs; got {len(tensors)}.")
        inputs = [_as_image(tensor, view) for tensor, view in zip(tensors, wanted, strict=True)]
        self._check(inputs)
        count = torch.get_num_threads()
        block = self._pool.take(count)
        try:
            bound: Bound | None = block.bound.get(self)
            if bound is None:
                offsets, size = self.schedule.places(count)
                block.grow(size)
                bound = Bound(self.schedule, count, offsets, block.start, size)
                block.bound[self] = bound
            if not is_from_nothing():
                return bound.run(inputs)
            block.wipe()
            results = bound.run(inputs)
            block.check(bound.size)
            for tensor in results:
                check_guards(tensor)
            return results
        finally:
            self._pool.put(count, block)

    def _check(self, inputs: Sequence[Tensor]) -> None:
        for number, (tensor, view) in enumerate(zip(inputs, self.schedule.inputs, strict=True)):
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


def _as_image(tensor: Tensor, view: View) -> Tensor:
    """A batch of rows of channels (N, L, C) as images one pixel wide, a volume as one image with
    its frames one below the other, a number as a row; other tensors as they are, or as rows if
    `view` is of rows."""
    rank = tensor.dim()
    if rank == 0:
        return tensor.view(1, 1)
    if rank == 3:
        return tensor.transpose(1, 2).unsqueeze(3)
    if rank != 2 and tensor.shape != view.shape:
        n, c, h, w = view.shape
        if h == w == 1 and tensor.shape[-1:] == (c,) and tensor.numel() == n * c:
            return tensor.reshape(n, c)
    return tensor.flatten(2, 3) if rank == 5 else tensor
