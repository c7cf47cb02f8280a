"""Calls on a GPU as CUDA graphs: of a whole plan, and of a kernel that is timed."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import of_kind
from ...graph.nodes.flat import leaves_of
from ...models.trees import can_be_remade, tuple_like
from ..program import PlanProgram


class CudaGraph:
    """A program on CUDA tensors as one CUDA graph: a call launches all its kernels at once.

    The graph reads and writes fixed memory, so calls take turns, each copies its inputs in and its
    results out, and a call on another stream waits for the one before.
    """

    def __init__(self, program: PlanProgram, inputs: Sequence[Any]) -> None:
        self._lock = threading.Lock()
        # The graph knows the weights by their addresses alone.
        self._program = program
        self._inputs = [x.clone() if isinstance(x, Tensor) else x for x in leaves_of(inputs)]
        self._device = next(x.device for x in self._inputs if isinstance(x, Tensor))
        with torch.cuda.device(self._device):
            self._graph, self._returned = _recorded(lambda: program.returned(*self._inputs))
            _cloned(self._returned)
            self._done = torch.cuda.Event()

    def __call__(self, *inputs: Any) -> Any:
        with self._lock, torch.cuda.device(self._device):
            self._done.wait()
            for own, given in zip(self._inputs, leaves_of(inputs), strict=True):
                if isinstance(own, Tensor):
                    own.copy_(given)
            self._graph.replay()
            values = _cloned(self._returned)
            self._done.record()
            return self._program.result(values)


def _recorded(call: Callable[[], Any], times: int = 1) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of so many calls, and what the last one returned, which a replay writes anew."""
    own, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(own)
    graph, result = torch.cuda.CUDAGraph(), None
    try:
        with searching(), warnings.catch_warnings():
            # A view launches nothing, and torch takes an empty graph for a mistake.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            with torch.cuda.stream(side):
                # Libraries allocate and choose kernels in first calls, which no graph may hold.
                for _ in range(3):
                    call()
            own.wait_stream(side)
            with torch.cuda.graph(graph):
                for _ in range(times):
                    result = call()
    finally:
        # Where a call waits for the host, torch gives up and stays on the stream of the graph.
        torch.cuda.set_stream(own)
    return graph, result


@contextlib.contextmanager
def searching() -> Iterator[None]:
    """Have cuDNN time its kernels for a convolution in the first call, not guess the fastest."""
    # The switch in torch.backends refuses to move once torch.testing has frozen it.
    before = torch._C._get_cudnn_benchmark()
    torch._C._set_cudnn_benchmark(True)
    try:
        yield
    finally:
        torch._C._set_cudnn_benchmark(before)


def replayed(call: Callable[[], Any], times: int) -> Callable[[], None]:
    """So many calls as one: as a graph where that can be, without what launching a kernel takes."""
    try:
        graph, _ = _recorded(call, times)
    except RuntimeError:

        def repeat() -> None:
            for _ in range(times):
                call()

        return repeat

    def replay() -> None:
        # A graph knows the weights of a call by their addresses alone: so it is kept as well.
        assert call is not None
        graph.replay()

    return replay


def _cloned(value: Any) -> Any:
    """`value` in memory of its own; RuntimeError if that cannot be said of a part of it."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) is dict:
        return {key: _cloned(item) for key, item in value.items()}
    if can_be_remade(value):
        return tuple_like(value, map(_cloned, value))
    if type(value) is list:
        return [*map(_cloned, value)]
    if value is None or isinstance(value, _UNCHANGING):
        return value
    raise RuntimeError(f"no graph can return {of_kind(value)}")


_UNCHANGING = (bool, int, float, complex, str, torch.dtype, torch.device)


def on_device(program: PlanProgram, inputs: Sequence[Any]) -> Callable[..., Any]:
    """`program` as one CUDA graph where all its inputs are on a GPU; otherwise as it is.

    A program with a kernel that no CUDA graph can hold (it waits for the host) stays as it is, and
    so does one that writes into its inputs, of which a graph has copies.
    """
    tensors = [x for x in leaves_of(inputs) if isinstance(x, Tensor)]
    if not tensors or not all(x.is_cuda for x in tensors) or program.writes_back:
        return program
    try:
        return CudaGraph(program, inputs)
    except RuntimeError:
        return program
