"""Time the candidates of every distinct layer, once; what was timed before is looked up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from .. import kernels
from ..formats import Format, to_format
from ..memory import Memory
from ..release import trim
from .calls import is_opaque
from .candidates import Candidate, candidates_of
from .options import Option, Options, remembered
from .recording import Record, Seen
from .specs import Layer, Operator
from .trials import fastest, sample, time_candidates


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
    known = memory.seconds(key)
    if known is None:
        x = sample(seen, Format.CONTIGUOUS)
        known = fastest({"": lambda: to_format(x, Format.CHANNELS_LAST)}, seen.device)[""]
        memory.put(key, known)
    return known


def switch_seconds(memory: Memory) -> float:
    """What it costs to enter a program of our kernels once."""
    if not kernels.available():
        return 0.0
    known = memory.seconds("call of a program")
    if known is None:
        from .native.stretch import call_seconds

        known = call_seconds()
        memory.put("call of a program", known)
    return known


def _options(
    graph: fx.GraphModule, record: Record, layer: Layer, memory: Memory, exact: bool
) -> tuple[Option, ...]:
    plain = isinstance(layer.spec, Operator)
    if plain and is_opaque(graph, layer.node):
        return (_as_recorded(record, layer),)
    candidates = [c for c in candidates_of(graph, record, layer) if c.exact or not exact]
    if plain and not candidates and not _has_images(record, layer):
        return (_as_recorded(record, layer),)
    names = [f"{c.name} {c.reads}" for c in candidates] + ["torch"] * plain
    if len(candidates) == 1 and not plain:
        return (Option(candidates[0].name, candidates[0].reads, candidates[0].writes, 0.0),)
    # A newer nhwc has other candidates: what an older one measured does not answer for them.
    key = f"{layer.spec.key} of {', '.join(sorted(names))}"
    known = remembered(memory.get(key))
    if known is None or not _are_of(known, candidates):
        timed = time_candidates(graph, record, layer, candidates, switch_seconds(memory))
        known = timed or (_as_recorded(record, layer),)
        memory.put(key, [option.to_dict() for option in known])
        trim()
    return known


def _are_of(options: Iterable[Option], candidates: Iterable[Candidate]) -> bool:
    """Whether remembered options are those of the candidates, or torch's own."""
    offered = {(c.name, c.reads, c.writes) for c in candidates}
    return all(o.kernel == "torch" or (o.kernel, o.reads, o.writes) in offered for o in options)


def _as_recorded(record: Record, layer: Layer) -> Option:
    read = next((s for s in (_image_in(record.values.get(n)) for n in layer.inputs) if s), None)
    wrote = _image_in(record.values.get(layer.node))
    reads, writes = read.layout if read else None, wrote.layout if wrote else None
    return Option("torch", reads, writes, 0.0)


def _has_images(record: Record, layer: Layer) -> bool:
    return any(_image_in(record.values.get(node)) for node in (*layer.inputs, layer.node))


def _image_in(value: Any) -> Seen | None:
    if isinstance(value, tuple):
        return next((seen for seen in map(_image_in, value) if seen), None)
    return value if isinstance(value, Seen) and len(value.shape) == 4 else None
