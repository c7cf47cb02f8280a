"""Time the candidates of a layer, in turns, on data that looks like what was recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..formats import Format, to_format
from ..kernels.tape.pages import side_by_side
from ..release import apart
from ..timing import interleave
from .calls import caller
from .candidates import Candidate, Run
from .options import Option
from .recording import Record, Seen, layout_of
from .specs import Layer, Operator, constants_of

LAYOUTS = (Format.CONTIGUOUS, Format.CHANNELS_LAST)

_HUGE = 1 << 26
"""Of weights of so many bytes there is one packed copy at a time; no cache holds them anyway."""

_TOLERANCE = 1e-3
"""A candidate further than this from eager, relative to its largest value, is broken."""

_FAR_BEHIND = 1.5
"""A candidate that takes this many times as long as the best will not come out before it."""


def time_candidates(
    graph: fx.GraphModule,
    record: Record,
    layer: Layer,
    candidates: Sequence[Candidate],
    switch: float,
) -> tuple[Option, ...]:
    """An option for every candidate that computes the same; `switch` is what a program costs."""
    samples = {node: sample(record.values[node], None) for node in layer.inputs}
    inputs = {
        layout: [_laid_out(samples[node], layout) for node in layer.inputs]
        for layout in (None, *LAYOUTS)
    }
    weighted = not isinstance(layer.spec, Operator)
    constants = constants_of(graph, layer) if weighted else (None, None)
    trials = [] if weighted else _trials_as_is(caller(graph, record, layer), inputs)
    expected = trials[0].call() if trials else None
    device = layer.spec.device
    evict = evictor(graph, constants[0]) if device == "cpu" else None
    huge = constants[0] is not None and constants[0].nbytes >= _HUGE
    options = [Option(c.name, c.reads, c.writes, 0.0) for c in candidates if c.free]
    for candidate in candidates:
        if candidate.free:
            continue
        with side_by_side():
            trial = _Trial.of(candidate, constants, inputs[candidate.reads])
        result = trial.call()
        if expected is None:
            expected = result
        if _close(result, expected):
            trials.append(trial)
        del trial
        if huge:
            options += _timed(trials, device, evict, switch)
            trials.clear()
    return (*options, *_timed(trials, device, evict, switch))


def shortest(program: Callable[..., Any], inputs: Sequence[Any]) -> float:
    """The seconds of the shortest of a few calls on these inputs."""
    device = next((str(x.device) for x in inputs if isinstance(x, Tensor)), "cpu")
    calls = {"": _bound(program, inputs)}
    [first] = interleave(calls, rounds=1, warmup=0, device=device)[""].seconds
    rounds = max(3, min(15, int(0.1 / max(first, 1e-6))))
    return min(interleave(calls, rounds=rounds, warmup=0, device=device)[""].seconds)


def fastest(
    runs: dict[str, Callable[[], Any]], device: str, between: Callable[[], object] | None = None
) -> dict[str, float]:
    """The shortest of a few calls each: what disturbs a call only ever makes it longer.

    What is far behind after two calls is not called again.
    """
    if not runs:
        return {}
    taken = interleave(runs, rounds=2, warmup=0, device=device, between=between)
    times = {name: min(samples.seconds) for name, samples in taken.items()}
    close = [name for name in runs if times[name] < _FAR_BEHIND * min(times.values())]
    longest = max(times[name] for name in close)
    rounds = max(2, min(5, int(0.02 / max(longest, 1e-6))))
    best = {name: runs[name] for name in close}
    taken = interleave(best, rounds=rounds, warmup=0, device=device, between=between)
    return times | {n: min(times[n], *samples.seconds) for n, samples in taken.items()}


def sample(value: Any, layout: Format | None) -> Any:
    """A tensor, or a tuple of them, that looks like what was recorded, in `layout`."""
    if isinstance(value, tuple):
        return tuple(sample(item, layout) for item in value)
    if not isinstance(value, Seen):
        return value
    floating = value.dtype.is_floating_point
    make: Any = torch.randn if floating else torch.zeros
    tensor: Tensor = make(value.shape, dtype=value.dtype, device=value.device)
    return _laid_out(apart(tensor), layout)


@dataclass(frozen=True)
class _Trial:
    """One candidate on inputs of its layout, ready to be timed."""

    kernel: str
    reads: Format | None
    writes: Format | None
    call: Callable[[], Any]

    @classmethod
    def of(cls, candidate: Candidate, constants: tuple[Any, ...], inputs: Sequence[Any]) -> _Trial:
        run = candidate.prepare(*constants)
        return cls(candidate.name, candidate.reads, candidate.writes, _bound(run, inputs))


def _timed(
    trials: Sequence[_Trial], device: str, evict: Callable[[], object] | None, switch: float
) -> list[Option]:
    calls = {str(number): trial.call for number, trial in enumerate(trials)}
    options = []
    for trial, seconds in zip(trials, fastest(calls, device, between=evict).values(), strict=True):
        if trial.kernel.startswith("nhwc"):
            # Within a program of many steps, what it costs to enter one is shared by all.
            seconds = max(seconds - switch, 0.05 * seconds)
        options.append(Option(trial.kernel, trial.reads, trial.writes, seconds))
    return options


def _trials_as_is(run: Run, inputs: dict[Format | None, list[Any]]) -> list[_Trial]:
    """The operator as torch has it, on contiguous and on channels-last input."""
    found = []
    for layout in LAYOUTS:
        try:
            result = run(*inputs[layout])
        except (RuntimeError, ValueError, TypeError, IndexError):
            continue  # `view` on channels-last data, say: then it reads the other layout.
        found.append(_Trial("torch", layout, _written(result), _bound(run, inputs[layout])))
    return found


def evictor(graph: fx.GraphModule, weight: Tensor | None) -> Callable[[], object] | None:
    """What pushes the last call's weights out of the caches where, in this model, they do not stay.

    Small weights may stay in the last cache, where other layers' large ones pass through as well.
    """
    if weight is None:
        return None
    total = sum(parameter.numel() for parameter in graph.parameters())
    near, last = 1 << 20, 1 << 23
    others = torch.ones(max(near, min(total, last)) if evicted(weight.shape) else near)
    return others.sum


def evicted(weight: Sequence[int]) -> bool:
    """Whether a trial finds weights of this shape in memory, as a call of a large model does."""
    return math.prod(weight) > 1 << 18


def _bound(run: Run, inputs: Sequence[Any]) -> Callable[[], Any]:
    return lambda: run(*inputs)


def _laid_out(value: Any, layout: Format | None) -> Any:
    if isinstance(value, tuple):
        return tuple(_laid_out(item, layout) for item in value)
    if not isinstance(value, Tensor) or value.ndim != 4 or not layout:
        return value
    laid = to_format(value, layout)
    return laid if laid.data_ptr() == value.data_ptr() else apart(laid)


def _written(result: Any) -> Format | None:
    while isinstance(result, (tuple, list)) and result:
        result = result[0]
    return layout_of(result) if isinstance(result, Tensor) else None


def _close(result: Any, expected: Any) -> bool:
    if not isinstance(result, Tensor) or not isinstance(expected, Tensor):
        return True
    if result.shape != expected.shape:
        return False
    scale = expected.abs().max().clamp_min(1e-30)
    return bool((result - expected).abs().max() <= _TOLERANCE * scale)
