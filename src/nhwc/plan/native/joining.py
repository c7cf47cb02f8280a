"""Which neighbouring layers of our kernels to compute as one step: where that is faster here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from ...memory import Memory, is_time
from ...timing import interleave
from ..assigning import Choice
from ..binding import stretches
from ..candidates import natives_of
from ..recording import Record
from ..specs import Layer, constants_of
from ..trials import evictor, sample
from .pairs import Pair, pairs_in
from .stretch import Stretch

_ROUNDS = 30
_LEAST_GAIN = 0.02
"""As a share of what the two take: less is what the next measurement may deny."""


def join(
    graph: fx.GraphModule, record: Record, layers: Sequence[Layer], choice: Choice, memory: Memory
) -> Choice:
    """`choice`, with the kernel of a pair for its second layer where the two gain most by it."""
    gains = []
    for unit in stretches(layers, choice):
        for pair in pairs_in(unit, record) if len(unit) > 1 else ():
            apart, together = _seconds(graph, record, pair, choice, memory)
            if apart - together > _LEAST_GAIN * apart:
                gains.append((apart - together, together, pair))
    found, taken = dict(choice), set[fx.Node]()
    for _, together, pair in sorted(gains, key=lambda one: one[0], reverse=True):
        first, second = pair.first.node, pair.second.node
        if taken & {first, second}:
            continue
        taken |= {first, second}
        # The first keeps the time that it takes alone, so that the sum is that of the pair.
        rest = max(0.0, together - choice[first].seconds)
        found[second] = replace(choice[second], kernel=pair.kernel, seconds=rest)
    return found


def _seconds(
    graph: fx.GraphModule, record: Record, pair: Pair, choice: Choice, memory: Memory
) -> tuple[float, float]:
    """What the two layers take as two steps and as one, timed in turns or remembered."""
    kernels = [choice[layer.node].kernel for layer in (pair.first, pair.second)]
    key = f"{pair.first.spec.key} by {kernels[0]}, {pair.second.spec.key} by {kernels[1]}"
    known = memory.get(f"{key}, or {pair.kernel}")
    if not isinstance(known, list) or len(known) != 2 or not all(map(is_time, known)):
        known = _time(graph, record, pair, choice)
        memory.put(f"{key}, or {pair.kernel}", known)
    return known[0], known[1]


def _time(graph: fx.GraphModule, record: Record, pair: Pair, choice: Choice) -> list[float]:
    own = constants_of(graph, pair.second)
    before = constants_of(graph, pair.first)
    apart, together = Stretch([pair.second.node]), Stretch([pair.second.node])
    for layer, constants in ((pair.first, before), (pair.second, own)):
        natives = natives_of(graph, record, layer)
        native = next(one for one in natives if one.name == choice[layer.node].kernel)
        apart.add(native, layer, native.pack(constants), record)
    together.add(pair.native(before, record), pair.layer, own, record)
    values = [sample(record.values[node], None) for node in apart.inputs]
    assert apart.inputs == together.inputs
    programs = [stretch.build(record) for stretch in (apart, together)]
    calls = {str(i): (lambda run=run: run(*values)) for i, run in enumerate(programs)}
    times = interleave(calls, rounds=_ROUNDS, between=evictor(graph, own[0]))
    return [min(times[name].seconds) for name in calls]
