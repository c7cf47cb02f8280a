"""Plans on a GPU: cuDNN's fused convolutions, and the whole call as one CUDA graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..formats import Format
from ..models.trees import tuple_like
from .implementation import Implementation, Run
from .specs import Convolution


def fused_convolutions(spec: Convolution) -> tuple[Implementation, ...]:
    """cuDNN's convolution + bias (+ residual) + ReLU, in either layout."""
    relu = spec.activation is not None and spec.activation.name == "relu"
    if not relu or not torch.backends.cudnn.is_available():
        return ()
    if spec.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return ()
    geometry = (spec.stride, spec.padding, spec.dilation, spec.groups)

    def prepare(layout: torch.memory_format, weight: Tensor, bias: Tensor | None) -> Run:
        own = weight.contiguous(memory_format=layout)
        if spec.residual:
            return lambda x, residual: torch.cudnn_convolution_add_relu(
                x, own, residual, 1.0, bias, *geometry
            )
        return lambda x: torch.cudnn_convolution_relu(x, own, bias, *geometry)

    last, plain = Format.CHANNELS_LAST, Format.CONTIGUOUS
    return (
        Implementation("cudnn", last, last, partial(prepare, torch.channels_last)),
        Implementation("cudnn", plain, plain, partial(prepare, torch.contiguous_format)),
    )


class CudaGraph:
    """A function of CUDA tensors as one CUDA graph: a call launches all its kernels at once.

    The graph reads and writes fixed memory, so calls take turns, each copies its inputs in and its
    results out, and a call on another stream waits for the one before.
    """

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Any]) -> None:
        self._lock = threading.Lock()
        self._inputs = [x.clone() if isinstance(x, Tensor) else x for x in inputs]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # Libraries allocate and choose kernels in their first calls, which no graph may hold.
            for _ in range(3):
                function(*self._inputs)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result = function(*self._inputs)
        self._done = torch.cuda.Event()

    def __call__(self, *inputs: Any) -> Any:
        with self._lock:
            self._done.wait()
            for own, given in zip(self._inputs, inputs, strict=True):
                if isinstance(own, Tensor):
                    own.copy_(given)
            self._graph.replay()
            result = _cloned(self._result)
            self._done.record()
            return result


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _cloned(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple_like(value, map(_cloned, value))
    return [*map(_cloned, value)] if isinstance(value, list) else value


def on_device(program: Callable[..., Any], inputs: Sequence[Any]) -> Callable[..., Any]:
    """`program` as one CUDA graph where all its inputs are on a GPU; otherwise as it is.

    A program with a kernel that no CUDA graph can hold (it waits for the host) stays as it is.
    """
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    if not tensors or not all(x.is_cuda for x in tensors):
        return program
    try:
        return CudaGraph(program, inputs)
    except RuntimeError:
        return program
