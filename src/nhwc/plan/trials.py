"""Time the implementations of a layer, in turns, on tensors like those that were recorded."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Container, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from .. import kernels
from ..formats import CHANNELS_LAST_OF, Format
from ..kernels.programs.pool import from_nothing
from ..kernels.tape.pages import side_by_side
from ..machine.host_memory import apart
from ..machine.timing import interleave
from ..models.trees import can_be_remade, tuple_like
from .evidence import RivalTime
from .gpu.graphs import replayed
from .implementation import Identifier, Implementation, Run
from .recording import Record, Seen, laid_out, layout_of
from .scene import Scene
from .specs import Layer, OperatorSpec
from .stretch import alone

_LAYOUTS = (Format.CONTIGUOUS, Format.CHANNELS_LAST)

_HUGE = 1 << 26
"""Weights of this many bytes are packed for one kernel at a time; no cache holds them anyway."""

NEAR = 1 << 20
"""Numbers that push all else out of the caches that are a core's own."""

_TOLERANCE = 1e-3
"""A kernel further than this from eager, relative to its largest value, is broken."""

_FAR_BEHIND = 1.5
"""A kernel that takes this many times as long as the best will not come out before it."""

_WAITED_S = 2e-4
"""A call may wait so long for a core, whatever it computes: no more says that it is behind."""

_DISTURBED_S = 0.05
"""Calls that took less in all are repeated before they count as far behind."""

_SHORT_S, _SHORT_TURNS = 0.01, 24
"""Short calls are repeated for so long, and so often: one of them then found all cores free."""

_REPLAYED = 8
"""On a GPU a run is timed as so many calls in one graph, as it runs in that of a plan."""

Trials = dict[Implementation, Callable[[], Any]]
"""Calls of implementations, each on inputs in its layout, ready to be timed."""


def time_layer(
    scene: Scene, layer: Layer, rivals: Container[Identifier] | None = None
) -> dict[Identifier, RivalTime]:
    """The times of each implementation that computes the same, or of `rivals` among them."""
    record = scene.record
    samples = {node: _given(record, node) for node in layer.inputs}
    inputs = {
        layout: [_laid_out(samples[node], layout) for node in layer.inputs]
        for layout in (None, *_LAYOUTS)
    }
    constants = scene.constants(layer)
    weight = constants[0] if constants else None
    trials = _as_called(scene, layer, inputs) if isinstance(layer.spec, OperatorSpec) else {}
    expected = next((call() for call in trials.values()), None)
    device = layer.spec.device
    evict = evictor(scene.graph, weight) if device == "cpu" else None
    huge = weight is not None and weight.nbytes >= _HUGE
    asked = lambda one: rivals is None or one.identifier in rivals
    trials = {one: call for one, call in trials.items() if asked(one)}
    known = [one for one in scene.implementations[layer.node] if asked(one)]
    taken = {one.identifier: RivalTime(0.0, 0.0, 0) for one in known if one.free}
    for one in known:
        if one.free:
            continue
        with side_by_side():
            call = _bound(alone(record, layer, one, constants), inputs[one.reads])
        try:
            with from_nothing():
                result = call()
        except Exception:
            if not one.compiles:
                raise
            continue  # The compiler refuses some kernels for some cards.
        if expected is None:
            expected = result
        if _close(result, expected):
            trials[one] = call
        del call
        if huge:
            taken |= _timed(trials, device, evict)
            trials.clear()
    return taken | _timed(trials, device, evict)


def shortest(program: Callable[..., Any], inputs: Sequence[Any]) -> RivalTime:
    """A few calls on these inputs."""
    device = next((str(x.device) for x in inputs if isinstance(x, Tensor)), "cpu")
    calls = {"": _bound(program, inputs)}
    [first] = interleave(calls, rounds=1, warmup=0, device=device)[""].seconds
    rounds = max(3, min(15, int(0.1 / max(first, 1e-6))))
    return RivalTime.of(interleave(calls, rounds=rounds, warmup=0, device=device)[""].seconds)


def fastest(
    runs: dict[str, Callable[[], Any]],
    device: str,
    between: Callable[[], object] | None = None,
    programs: Collection[str] = (),
) -> dict[str, RivalTime]:
    """A sitting: a few calls of each in turns.

    Those in `programs` are steps of ours, each in a program of its own, where in a model many steps
    share one. What it takes to enter a program is therefore timed in the same turns and taken off.
    A run that is far behind after four calls is not called again, unless these were so short that
    they may have waited for a core most of the time: kernels of ours want all cores at once.
    """
    if not runs:
        return {}
    turns = _Turns(runs, device, between, programs)
    turns.take(turns.runs, 2)
    close = turns.close()
    turns.take([n for n in runs if n not in close and sum(turns.seconds[n]) < _DISTURBED_S], 2)
    close = turns.close()
    longest = max(min(turns.seconds[name]) for name in close)
    rounds = max(2, min(5, int(0.02 / max(longest, 1e-6))))
    if longest < 2 * _WAITED_S:
        rounds = max(rounds, min(_SHORT_TURNS, int(_SHORT_S / (longest + _seconds_of(between)))))
    turns.take(close, rounds)
    return {name: turns.time_of(name) for name in runs}


class _Turns:
    """Runs that are timed in turns, and the seconds of every call; entering a program among them
    where there are `programs`."""

    def __init__(
        self,
        runs: dict[str, Callable[[], Any]],
        device: str,
        between: Callable[[], object] | None,
        programs: Collection[str],
    ) -> None:
        self._times = _REPLAYED if device.startswith("cuda") else 1
        if self._times > 1:
            runs = {name: replayed(run, self._times) for name, run in runs.items()}
        self.runs = {**runs, _ENTRY: entry()} if programs else runs
        self.seconds: dict[str, list[float]] = {name: [] for name in self.runs}
        self._where: dict[str, Any] = {"device": device, "between": between, "warmup": 0}
        self._programs = programs

    def take(self, names: Collection[str], rounds: int) -> None:
        if names:
            some = {name: self.runs[name] for name in names}
            for name, samples in interleave(some, rounds=rounds, **self._where).items():
                self.seconds[name] += [one / self._times for one in samples.seconds]

    def time_of(self, name: str) -> RivalTime:
        found = RivalTime.of(self.seconds[name])
        return found.less(min(self.seconds[_ENTRY])) if name in self._programs else found

    def close(self) -> list[str]:
        """The runs that may come out first, and the entry."""
        least = {name: self.time_of(name).least_s for name in self.runs if name != _ENTRY}
        best_s = min(least.values())
        limit = max(_FAR_BEHIND * best_s, best_s + _WAITED_S)
        return [name for name in self.runs if least.get(name, 0.0) <= limit]


def _seconds_of(between: Callable[[], object] | None) -> float:
    """What a call of `between` takes, if there is any."""
    if between is None:
        return 0.0
    start = time.perf_counter()
    between()
    return time.perf_counter() - start


_ENTRY = "entry"
"""The name of the call that only enters a program."""


@cache
def entry() -> Callable[[], Any]:
    """A call of a program with almost nothing in it."""
    builder = kernels.Builder()
    x, y = builder.input((1, 8, 1, 1)), builder.buffer((1, 8, 1, 1))
    builder.add(kernels.activation_step, x, y)
    builder.output(y)
    program, tensor = builder.build(), torch.zeros(1, 8, 1, 1)
    return lambda: program(tensor)


def sample(value: Any, layout: Format | None) -> Any:
    """A tensor, or a tuple of them, like the recorded one, in `layout` if one is given, else in its
    own; other values unchanged."""
    if can_be_remade(value):
        return tuple_like(value, [sample(item, layout) for item in value])
    if not isinstance(value, Seen):
        return value
    # Of 8 bits, torch draws none.
    floating = value.dtype.is_floating_point
    make: Any = torch.randn if floating else torch.zeros
    tensor: Tensor = make(value.shape, device=value.device).to(value.dtype)
    return _laid_out(apart(tensor), layout or value.layout)


def _given(record: Record, node: fx.Node) -> Any:
    """What `node` gives in a trial: a constant, or else a sample."""
    made = record.made.get(node)
    return sample(record.values[node], None) if made is None else apart(made)


def _timed(
    trials: Trials, device: str, evict: Callable[[], object] | None
) -> dict[Identifier, RivalTime]:
    calls = {str(number): call for number, call in enumerate(trials.values())}
    ours = [name for name, one in zip(calls, trials, strict=True) if one.ours]
    taken = fastest(calls, device, evict, ours).values()
    return {one.identifier: times for one, times in zip(trials, taken, strict=True)}


def _as_called(scene: Scene, layer: Layer, inputs: dict[Format | None, list[Any]]) -> Trials:
    """The operator as torch has it, on contiguous and on channels-last input."""
    run = scene.called(layer, None, None).prepare()
    found = {}
    for layout in _LAYOUTS:
        try:
            result = run(*inputs[layout])
        except (RuntimeError, ValueError, TypeError, IndexError):
            continue  # `view` on channels-last data, say: then it reads the other layout.
        found[scene.called(layer, layout, _written(result))] = _bound(run, inputs[layout])
    return found


def evictor(graph: fx.GraphModule, weight: Tensor | None) -> Callable[[], object] | None:
    """A function that pushes the last call's weights out of the caches, as this model does.

    Small weights may stay in the last cache, where other layers' large ones pass through as well.
    """
    if weight is None:
        return None
    total = sum(parameter.numel() for parameter in graph.parameters())
    last = 1 << 23
    others = torch.ones(max(NEAR, min(total, last)) if evicted(weight.shape) else NEAR)
    return others.sum


def evicted(weight: Sequence[int]) -> bool:
    """Whether a trial finds weights of this shape in memory, as a call of a large model does."""
    return math.prod(weight) > 1 << 18


def _bound(run: Run, inputs: Sequence[Any]) -> Callable[[], Any]:
    return lambda: run(*inputs)


def _laid_out(value: Any, layout: Format | None) -> Any:
    if can_be_remade(value):
        return tuple_like(value, [_laid_out(item, layout) for item in value])
    if not isinstance(value, Tensor) or value.ndim not in CHANNELS_LAST_OF or not layout:
        return value
    laid = laid_out(value, layout)
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
    if not expected.numel():
        return True
    difference = (result - expected).abs()
    if not difference.max().isfinite():
        # The root of a negative number is NaN: on random numbers such answers are of both kinds.
        finite = expected.isfinite()
        if not torch.equal(result.isfinite(), finite):
            return False
        difference, expected = difference.where(finite, 0), expected.where(finite, 0)
    scale = expected.abs().max().clamp_min(1e-30)
    inexact = expected.is_floating_point() or expected.is_complex()
    tolerance = max(_TOLERANCE, 4 * torch.finfo(expected.dtype).eps if inexact else 0.0)
    return bool(difference.max() <= tolerance * scale)
