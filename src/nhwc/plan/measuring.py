"""Time every layer by each of its implementations, or read from the ledger what is known.

What the ledger knows may be a verdict of one moment. Where the evidence is open, a later plan holds
another sitting, the layers that take most time first, as long as `Leisure` lasts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .. import kernels
from ..formats import CHANNELS_LAST_OF, Format
from ..machine.host_memory import trim
from ..machine.timing import interleave
from .ahead import compile_ahead
from .evidence import Evidence, RivalTime, Sitting, evidence_of
from .implementation import Identifier, Implementation, Timed, Timings
from .ledger import Ledger
from .recognize import is_opaque
from .recording import Seen, laid_out
from .scene import Scene, UnknownKernel
from .specs import Layer, OperatorSpec
from .trials import NEAR, entry, fastest, sample, time_layer

_LOOKING_S = 0.1


class Leisure:
    """The time that is left for measuring again what is known; the last sitting may exceed it."""

    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def left(self) -> bool:
        return self._seconds > 0

    @contextmanager
    def spend(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds -= time.perf_counter() - start


@dataclass(frozen=True)
class Measured:
    """What may compute each layer with its time, and the evidence, where there was a choice."""

    timings: Timings
    evidence: dict[fx.Node, Evidence]


def measure(
    scene: Scene,
    ledger: Ledger,
    leisure: Leisure,
    progress: Callable[[int, int, str], None] | None = None,
) -> Measured:
    """The implementations of every layer with their times; of each kind one layer is timed."""
    kinds = {kind: some for kind, some in scene.kinds().items() if _has_choice(scene, some[0])}
    compile_ahead(scene, (some[-1] for kind, some in kinds.items() if ledger.get(kind) is None))
    found: dict[str, Evidence] = {}
    for number, (kind, layers) in enumerate(kinds.items()):
        if progress is not None:
            progress(number, len(kinds), layers[0].spec.key)
        found[kind] = _known(scene, layers, ledger.get(kind)) or _begin(scene, layers, ledger)
    # What was measured a moment ago would be measured at the same moment.
    waiting = [kind for kind in kinds if found[kind].open and not ledger.has_new(kind)]
    for kind in sorted(waiting, key=lambda kind: -_at_stake(found[kind], len(kinds[kind]))):
        if not leisure.left():
            break
        layer = kinds[kind][-1]
        if progress is not None:
            progress(len(kinds) - 1, len(kinds), f"{layer.spec.key} once more")
        with leisure.spend():
            found[kind] = _again(scene, layer, found[kind], found[kind].open, ledger)
    timings: Timings = {layer.node: _only(scene, layer) for layer in scene.layers}
    evidence = {}
    for kind, layers in kinds.items():
        for layer in layers:
            timings[layer.node] = _timed(scene, layer, found[kind])
            evidence[layer.node] = found[kind]
    return Measured(timings, evidence)


def sat(
    ledger: Ledger,
    leisure: Leisure,
    key: str,
    rivals: Collection[str],
    hold: Callable[[], Sitting],
) -> Evidence:
    """The evidence on `rivals`: after a sitting if there is none, after another if it is open.

    `hold` holds a sitting over all of them.
    """
    known = evidence_of(ledger.get(key))
    if known is None or {*known.rivals} != {*rivals}:
        found = Evidence().with_sitting(hold())
    elif known.settled or ledger.has_new(key) or not leisure.left():
        return known
    else:
        with leisure.spend():
            found = known.with_sitting(hold())
    ledger.put(key, found.to_entry())
    return found


def conversion_seconds(seen: Seen, ledger: Ledger, leisure: Leisure) -> float:
    """The time of a copy of this tensor into the other layout."""

    def hold() -> RivalTime:
        x = sample(seen, Format.CONTIGUOUS)
        return fastest({"": lambda: laid_out(x, Format.CHANNELS_LAST)}, seen.device)[""]

    return _alone_seconds(ledger, f"convert {seen}", leisure, hold)


def switch_seconds(ledger: Ledger, leisure: Leisure) -> float:
    """The time it takes to enter a program of our kernels once."""
    if not kernels.available():
        return 0.0
    return _alone_seconds(ledger, "call of a program", leisure, _call_of_a_program)


def _alone_seconds(
    ledger: Ledger, key: str, leisure: Leisure, hold: Callable[[], RivalTime]
) -> float:
    """The least time of what has no rival, taken in two runs, or more if these were restless."""
    known = evidence_of(ledger.get(key))
    if known is None or known.rivals != ("",):
        known = Evidence()
    again = bool(known.sittings) and not (ledger.has_new(key) or known.alone_is_sure)
    if not known.sittings or (again and leisure.left()):
        with leisure.spend() if again else nullcontext():
            known = known.with_sitting({"": hold()})
        ledger.put(key, known.to_entry())
    return known.seconds[""]


def _call_of_a_program() -> RivalTime:
    """Entering a program, many times, with the caches full of something else, as in a model.

    On a busy machine most calls wait until other work leaves a second core.
    """
    others = torch.ones(NEAR)
    seconds: list[float] = []
    end = time.perf_counter() + _LOOKING_S
    while not seconds or time.perf_counter() < end:
        seconds += interleave({"": entry()}, rounds=20, between=others.sum)[""].seconds
    return RivalTime.of(seconds)


def _has_choice(scene: Scene, layer: Layer) -> bool:
    """Whether there is something to time: an operator's layouts, or several implementations."""
    count = len(scene.implementations[layer.node])
    if not isinstance(layer.spec, OperatorSpec):
        return count > 1
    return count > 0 or (_has_images(scene, layer) and not is_opaque(scene.graph, layer.node))


def _only(scene: Scene, layer: Layer) -> tuple[Timed, ...]:
    known = scene.implementations[layer.node]
    return (Timed(known[0] if known else _as_recorded(scene, layer), 0.0),)


def _at_stake(evidence: Evidence, count: int) -> float:
    """The seconds of a call that layers of this kind take, of which there are `count`."""
    return count * evidence.seconds[evidence.leader]


def _begin(scene: Scene, layers: Sequence[Layer], ledger: Ledger) -> Evidence:
    """The first sitting over the implementations of a kind, on one of its layers."""
    taken = time_layer(scene, layers[-1])
    if not taken:
        taken = {_as_recorded(scene, layers[-1]).identifier: RivalTime(0.0, 0.0, 0)}
    return _kept(scene, layers[-1], Evidence(), taken, ledger)


def _again(
    scene: Scene, layer: Layer, known: Evidence, rivals: Sequence[str], ledger: Ledger
) -> Evidence:
    """`known` with another sitting, over `rivals`."""
    taken = time_layer(scene, layer, {_identifier(text) for text in rivals})
    return _kept(scene, layer, known, taken, ledger)


def _kept(
    scene: Scene,
    layer: Layer,
    known: Evidence,
    taken: Mapping[Identifier, RivalTime],
    ledger: Ledger,
) -> Evidence:
    evidence = known.with_sitting({_text(name): one for name, one in taken.items()})
    ledger.put(scene.kind(layer), evidence.to_entry())
    trim()
    return evidence


def _known(scene: Scene, layers: Sequence[Layer], entry: Any) -> Evidence | None:
    """The evidence in an entry of the ledger.

    None if there is none, or it is about a kernel that is not here: another nhwc had it.
    """
    found = evidence_of(entry)
    try:
        for name in map(_identifier, found.rivals if found else ()):
            for layer in layers:
                scene.find(layer, name)
    except (ValueError, UnknownKernel):
        return None
    return found


def _timed(scene: Scene, layer: Layer, evidence: Evidence) -> tuple[Timed, ...]:
    seconds, spread, turns = evidence.seconds, evidence.spread, evidence.turns
    return tuple(
        Timed(scene.find(layer, _identifier(name)), seconds[name], spread[name], turns[name])
        for name in evidence.rivals
    )


def _text(identifier: Identifier) -> str:
    return " | ".join(part or "" for part in identifier)


def _identifier(text: str) -> Identifier:
    """The implementation that a rival's name stands for; ValueError if it is no such name."""
    name, reads, writes = text.split(" | ")
    return Identifier(name, reads or None, writes or None)


def _as_recorded(scene: Scene, layer: Layer) -> Implementation:
    """Torch's own kernel, in the layouts in which it was seen to read and write."""
    values = scene.record.values
    read = next(filter(None, (_image_in(values.get(node)) for node in layer.inputs)), None)
    wrote = _image_in(values.get(layer.node))
    return scene.called(layer, read.layout if read else None, wrote.layout if wrote else None)


def _has_images(scene: Scene, layer: Layer) -> bool:
    values = scene.record.values
    return any(_image_in(values.get(node)) for node in (*layer.inputs, layer.node))


def _image_in(value: Any) -> Seen | None:
    if isinstance(value, tuple):
        return next((seen for seen in map(_image_in, value) if seen), None)
    return value if isinstance(value, Seen) and len(value.shape) in CHANNELS_LAST_OF else None
