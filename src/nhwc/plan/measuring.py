"""Time every layer by each of its implementations: measured once, then read from the ledger."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import kernels
from ..formats import CHANNELS_LAST_OF, Format
from ..machine.host_memory import trim
from ..machine.timing import interleave
from .implementation import Identifier, Implementation, Timed, Timings
from .ledger import Ledger, is_time
from .recognize import is_opaque
from .recording import Seen, laid_out
from .scene import Scene, UnknownKernel
from .specs import Layer, OperatorSpec
from .trials import fastest, sample, time_layer

_LOOKING_S = 0.1


def measure(
    scene: Scene, ledger: Ledger, progress: Callable[[int, int, str], None] | None = None
) -> Timings:
    """The implementations of every layer with their times; of each kind one layer is timed."""
    kinds = scene.kinds()
    found: Timings = {}
    for number, (kind, layers) in enumerate(kinds.items()):
        if progress is not None:
            progress(number, len(kinds), layers[0].spec.key)
        if _has_choice(scene, layers[0]):
            found |= _timed(scene, kind, layers, ledger)
        else:
            found |= {layer.node: _only(scene, layer) for layer in layers}
    return found


def conversion_seconds(seen: Seen, ledger: Ledger) -> float:
    """The time of a copy of this tensor into the other layout."""
    key = f"convert {seen}"
    known = ledger.seconds(key)
    if known is None:
        x = sample(seen, Format.CONTIGUOUS)
        known = fastest({"": lambda: laid_out(x, Format.CHANNELS_LAST)}, seen.device)[""]
        ledger.put(key, known)
    return known


def switch_seconds(ledger: Ledger) -> float:
    """The time it takes to enter a program of our kernels once."""
    if not kernels.available():
        return 0.0
    known = ledger.seconds("call of a program")
    if known is None:
        known = _call_seconds()
        ledger.put("call of a program", known)
    return known


def _call_seconds() -> float:
    """The time of calling a program with almost nothing in it: the least of many calls.

    On a busy machine most calls wait until other work leaves a second core.
    """
    builder = kernels.Builder()
    x, y = builder.input((1, 8, 1, 1)), builder.buffer((1, 8, 1, 1))
    builder.add(kernels.activation_step, x, y)
    builder.output(y)
    program, tensor = builder.build(), torch.zeros(1, 8, 1, 1)
    least, end = math.inf, time.perf_counter() + _LOOKING_S
    while time.perf_counter() < end:
        times = interleave({"": lambda: program(tensor)}, rounds=20)
        least = min(least, *times[""].seconds)
    return least


def _has_choice(scene: Scene, layer: Layer) -> bool:
    """Whether there is something to time: an operator's layouts, or several implementations."""
    count = len(scene.implementations[layer.node])
    if not isinstance(layer.spec, OperatorSpec):
        return count > 1
    return count > 0 or (_has_images(scene, layer) and not is_opaque(scene.graph, layer.node))


def _only(scene: Scene, layer: Layer) -> tuple[Timed, ...]:
    known = scene.implementations[layer.node]
    return (Timed(known[0] if known else _as_recorded(scene, layer), 0.0),)


def _timed(scene: Scene, kind: str, layers: Sequence[Layer], ledger: Ledger) -> Timings:
    """The times of all layers of a kind, from the ledger or measured on one of them."""
    known = _read(scene, layers, ledger.get(kind))
    if known is None:
        timed = time_layer(scene, layers[-1], switch_seconds(ledger))
        entries = [_entry(one) for one in timed or _only(scene, layers[-1])]
        ledger.put(kind, entries)
        trim()
        known = _read(scene, layers, entries)
        assert known is not None
    return known


def _entry(timed: Timed) -> dict[str, Any]:
    name, reads, writes = timed.implementation.identifier
    return {"kernel": name, "reads": reads, "writes": writes, "s": timed.seconds}


def _read(scene: Scene, layers: Sequence[Layer], entries: Any) -> Timings | None:
    """The times that the ledger's `entries` have for these layers.

    None if there are none, or one is for a kernel that is not here: another nhwc had it.
    """
    found: Timings = {}
    try:
        names = [Identifier(one["kernel"], one["reads"], one["writes"]) for one in entries]
        seconds = [one["s"] for one in entries]
        if not all(map(is_time, seconds)):
            return None
        for layer in layers:
            some = [scene.find(layer, name) for name in names]
            found[layer.node] = tuple(map(Timed, some, seconds))
    except (TypeError, KeyError, ValueError, UnknownKernel):
        return None
    return found if seconds else None


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
