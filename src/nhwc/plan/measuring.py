"""Time the candidates of every distinct layer, once; what was timed before is looked up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .. import kernels
from ..formats import Format, to_format
from ..memory import Memory
from ..release import trim
from ..timing import interleave
from .calls import caller, is_opaque
from .candidates import Candidate, Run, candidates_of
from .recording import Record, Seen, layout_of
from .specs import Layer, Operator, constants_of

LAYOUTS = (Format.CONTIGUOUS, Format.CHANNELS_LAST)

_TOLERANCE = 1e-3
"""A candidate further than this from eager, relative to its largest value, is broken."""


_FAR_BEHIND = 1.5
"""A candidate that takes this many times as long as the best will not come out before it."""


@dataclass(frozen=True)
class Option:
    """A candidate for a layer, with the layouts it reads and writes and the time it took."""

    kernel: str
    reads: Format | None
    writes: Format | None
    seconds: float

    @property
    def native(self) -> bool:
        """Whether it is a kernel of ours, which can share a program with others of ours."""
        return self.kernel.startswith("nhwc")

    @property
    def label(self) -> str:
        return f"{self.kernel} {self.reads}" if self.reads else self.kernel

    def to_dict(self) -> dict[str, Any]:
        names = [str(x) if x else None for x in (self.reads, self.writes)]
        return {"kernel": self.kernel, "reads": names[0], "writes": names[1], "s": self.seconds}

    @classmethod
    def of(cls, data: dict[str, Any]) -> Option:
        reads, writes = (Format(x) if x else None for x in (data["reads"], data["writes"]))
        return cls(data["kernel"], reads, writes, float(data["s"]))


Options = dict[str, tuple[Option, ...]]


def measure(
    graph: fx.GraphModule,
    record: Record,
    layers: Iterable[Layer],
    memory: Memory,
    *,
    exact: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> Options:
    """The options of every distinct specification among `layers`, timed or remembered."""
    found: Options = {}
    distinct = {layer.spec.key: layer for layer in layers}
    for number, (key, layer) in enumerate(distinct.items()):
        if progress is not None:
            progress(number, len(distinct), key)
        found[key] = _options(graph, record, layer, memory, exact)
    return found


def conversion_seconds(seen: Seen, memory: Memory) -> float:
    """What a copy of this tensor into the other layout takes."""
    key = f"convert {seen}"
    known = memory.get(key)
    if not isinstance(known, float):
        x = sample(seen, Format.CONTIGUOUS)
        known = _fastest({"": lambda: to_format(x, Format.CHANNELS_LAST)}, seen.device)[""]
        memory.put(key, known)
    return known


def fastest(programs: Sequence[Callable[..., Any]], inputs: Sequence[Any]) -> int:
    """The number of the program with the shortest median on these inputs."""
    device = next((str(x.device) for x in inputs if isinstance(x, Tensor)), "cpu")
    calls = {str(number): _bound(program, inputs) for number, program in enumerate(programs)}
    first = interleave(calls, rounds=1, warmup=0, device=device)
    longest = max(samples.seconds[0] for samples in first.values())
    rounds = max(3, min(15, int(0.1 / max(longest, 1e-6))))
    taken = interleave(calls, rounds=rounds, warmup=0, device=device)
    return min(range(len(programs)), key=lambda number: taken[str(number)].median_s)


def sample(value: Any, layout: Format | None) -> Any:
    """A tensor, or a tuple of them, that looks like what was recorded, in `layout`."""
    if isinstance(value, tuple):
        return tuple(sample(item, layout) for item in value)
    if not isinstance(value, Seen):
        return value
    floating = value.dtype.is_floating_point
    make: Any = torch.randn if floating else torch.zeros
    tensor: Tensor = make(value.shape, dtype=value.dtype, device=value.device)
    return to_format(tensor, layout) if layout and tensor.ndim == 4 else tensor


def switch_seconds(memory: Memory) -> float:
    """What it costs to enter a program of our kernels once."""
    if not kernels.available():
        return 0.0
    known = memory.get("call of a program")
    if not isinstance(known, float):
        from .native.stretch import call_seconds

        known = call_seconds()
        memory.put("call of a program", known)
    return known


def _options(
    graph: fx.GraphModule, record: Record, layer: Layer, memory: Memory, exact: bool
) -> tuple[Option, ...]:
    plain = isinstance(layer.spec, Operator)
    if plain and (not _has_images(record, layer) or is_opaque(graph, layer.node)):
        return (_as_recorded(record, layer),)
    candidates = [c for c in candidates_of(graph, record, layer) if c.exact or not exact]
    names = [f"{c.name} {c.reads}" for c in candidates] + ["torch"] * plain
    if len(candidates) == 1 and not plain:
        return (Option(candidates[0].name, candidates[0].reads, candidates[0].writes, 0.0),)
    # A newer nhwc has other candidates: what an older one measured does not answer for them.
    key = f"{layer.spec.key} of {', '.join(sorted(names))}"
    known = _remembered(memory.get(key))
    if known is None:
        timed = _time(graph, record, layer, candidates, switch_seconds(memory))
        known = timed or (_as_recorded(record, layer),)
        memory.put(key, [option.to_dict() for option in known])
        trim()
    return known


@dataclass(frozen=True)
class _Trial:
    """One candidate on inputs of its layout, ready to be timed."""

    kernel: str
    reads: Format | None
    writes: Format | None
    call: Callable[[], Any]


def _time(
    graph: fx.GraphModule,
    record: Record,
    layer: Layer,
    candidates: Sequence[Candidate],
    switch: float,
) -> tuple[Option, ...]:
    samples = {node: sample(record.values[node], None) for node in layer.inputs}
    values = [samples[node] for node in layer.inputs]
    weighted = not isinstance(layer.spec, Operator)
    constants = constants_of(graph, layer) if weighted else (None, None)
    trials = [] if weighted else _trials_as_is(caller(graph, record, layer), values)
    expected = trials[0].call() if trials else None
    for candidate in candidates:
        if candidate.free:
            continue
        run = candidate.prepare(*constants)
        inputs = [_laid_out(value, candidate.reads) for value in values]
        result = run(*inputs)
        if expected is None:
            expected = result
        elif not _close(result, expected):
            continue
        reads, writes = candidate.reads, candidate.writes
        trials.append(_Trial(candidate.name, reads, writes, _bound(run, inputs)))
    device = layer.spec.device
    calls = {str(number): trial.call for number, trial in enumerate(trials)}
    evict = _evictor(graph, constants[0]) if device == "cpu" else None
    times = _fastest(calls, device, between=evict)
    options = [Option(c.name, c.reads, c.writes, 0.0) for c in candidates if c.free]
    for number, trial in enumerate(trials):
        seconds = times[str(number)]
        if trial.kernel.startswith("nhwc"):
            # Within a program of many steps, what it costs to enter one is shared by all.
            seconds = max(seconds - switch, 0.05 * seconds)
        options.append(Option(trial.kernel, trial.reads, trial.writes, seconds))
    return tuple(options)


def _trials_as_is(run: Run, values: Sequence[Any]) -> list[_Trial]:
    """The operator as torch has it, on contiguous and on channels-last input."""
    found = []
    for layout in LAYOUTS:
        inputs = [_laid_out(value, layout) for value in values]
        try:
            result = run(*inputs)
        except (RuntimeError, ValueError, TypeError, IndexError):
            continue  # `view` on channels-last data, say: then it reads the other layout.
        found.append(_Trial("torch", layout, _written(result), _bound(run, inputs)))
    return found


def _fastest(
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


def _evictor(graph: fx.GraphModule, weight: Tensor | None) -> Callable[[], object] | None:
    """What pushes the last call's weights out of the caches where, in this model, they do not stay.

    Small weights may stay in the last cache, where other layers' large ones pass through as well.
    """
    if weight is None:
        return None
    total = sum(parameter.numel() for parameter in graph.parameters())
    near, last = 1 << 20, 1 << 23
    large = weight.numel() > near // 4
    others = torch.ones(max(near, min(total, last)) if large else near)
    return others.sum


def _bound(run: Run, inputs: Sequence[Any]) -> Callable[[], Any]:
    return lambda: run(*inputs)


def _laid_out(value: Any, layout: Format | None) -> Any:
    if isinstance(value, tuple):
        return tuple(_laid_out(item, layout) for item in value)
    if isinstance(value, Tensor) and value.ndim == 4 and layout:
        return to_format(value, layout)
    return value


def _written(result: Any) -> Format | None:
    while isinstance(result, (tuple, list)) and result:
        result = result[0]
    return layout_of(result) if isinstance(result, Tensor) else None


def _has_images(record: Record, layer: Layer) -> bool:
    return any(_image_in(record.values.get(node)) for node in (*layer.inputs, layer.node))


def _image_in(value: Any) -> Seen | None:
    if isinstance(value, tuple):
        return next((seen for seen in map(_image_in, value) if seen), None)
    return value if isinstance(value, Seen) and len(value.shape) == 4 else None


def _as_recorded(record: Record, layer: Layer) -> Option:
    read = next((s for s in (_image_in(record.values.get(n)) for n in layer.inputs) if s), None)
    wrote = _image_in(record.values.get(layer.node))
    reads, writes = read.layout if read else None, wrote.layout if wrote else None
    return Option("torch", reads, writes, 0.0)


def _close(result: Any, expected: Any) -> bool:
    if not isinstance(result, Tensor) or not isinstance(expected, Tensor):
        return True
    if result.shape != expected.shape:
        return False
    scale = expected.abs().max().clamp_min(1e-30)
    return bool((result - expected).abs().max() <= _TOLERANCE * scale)


def _remembered(data: Any) -> tuple[Option, ...] | None:
    try:
        return tuple(Option.of(item) for item in data) or None
    except (TypeError, KeyError, ValueError):
        return None
