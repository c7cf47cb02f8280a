"""Read torch's profiler: the time of each call, and the copies inside an operator's kernel."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd.profiler import profile

from ..models.preserve import turn
from .calls import Call, Copy

_LABEL = "nhwc::"


def profiled(run: Callable[[], object], *, cuda: bool) -> Any:
    """Run under the profiler, of which torch bears one at a time, with shapes and strides."""
    # torch.profiler's own imports torch's compilers.
    device = "cuda" if cuda else None
    with turn, _quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile(use_device=device, use_kineto=True, record_shapes=True) as profiler:
            run()
            if cuda:
                torch.cuda.synchronize()
    return profiler


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Let Kineto not log its start and stop to stderr: it reads this level when it first starts."""
    told = "KINETO_LOG_LEVEL" in os.environ
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        yield
    finally:
        if not told:
            os.environ.pop("KINETO_LOG_LEVEL", None)


def with_profile(calls: Sequence[Call], profiler: Any, *, cuda: bool) -> list[Call]:
    """Return the calls with the seconds and the nested layout copies the profiler saw in them."""
    roots = profiler.kineto_results.experimental_event_tree()
    found = {event.name: event for event in _walk(roots) if event.name.startswith(_LABEL)}
    device = _device_seconds(profiler) if cuda else {}
    joined = []
    for call in calls:
        label = f"{_LABEL}{call.index}"
        event = found.get(label)
        if event is not None:
            seconds = device.get(label, _seconds(event))
            call = dataclasses.replace(call, seconds=seconds, copies=tuple(_copies(event)))
        joined.append(call)
    return joined


def _walk(events: Sequence[Any]) -> Iterator[Any]:
    stack = list(events)
    while stack:
        event = stack.pop()
        yield event
        stack.extend(event.children)


def _seconds(event: Any) -> float:
    """The event's time minus the time that our own dispatch mode added inside it."""
    return max(0.0, float(event.duration_time_ns - _overhead_ns(event)) / 1e9)


def _overhead_ns(event: Any) -> float:
    total = 0.0
    for child in event.children:
        if child.name == "PythonDispatchMode":
            inner = sum(c.duration_time_ns - _overhead_ns(c) for c in child.children)
            total += child.duration_time_ns - inner
        else:
            total += _overhead_ns(child)
    return total


def _device_seconds(profiler: Any) -> dict[str, float]:
    events = profiler.function_events or []
    return {e.name: e.device_time_total / 1e6 for e in events if e.name.startswith(_LABEL)}


def _copies(event: Any) -> Iterator[Copy]:
    for inner in _walk([event]):
        if inner.name != "aten::copy_":
            continue
        tensors = [i for i in inner.extra_fields.inputs if hasattr(i, "strides")]
        if len(tensors) < 2:
            continue
        target, source = tensors[:2]
        same = target.sizes == source.sizes
        if not same or len(target.sizes) < 3 or not _reorders(target, source):
            continue
        yield Copy(
            shape=tuple(target.sizes),
            source_strides=tuple(source.strides),
            target_strides=tuple(target.strides),
            bytes=target.dtype.itemsize * math.prod(target.sizes),
            seconds=_seconds(inner),
        )


def _reorders(target: Any, source: Any) -> bool:
    """Whether another dimension is densest in the copy; one with a stride of 0 is not in order."""
    dims = [d for d, size in enumerate(target.sizes) if size > 1 and source.strides[d] > 0]
    first = {min(dims, key=lambda d: (t.strides[d], -d), default=0) for t in (target, source)}
    return len(first) > 1
