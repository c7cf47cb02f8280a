"""Compute neighbouring layers of our kernels as one step, where that is faster here."""

from __future__ import annotations

from ..machine.timing import interleave
from .binding import handed_over, stretches
from .implementation import Choice, Implementation, Timed
from .ledger import Ledger, is_time
from .scene import Scene
from .specs import Layer
from .stretch import together
from .trials import evictor, sample

_ROUNDS = 30
_LEAST_GAIN = 0.02
"""The least gain, as a share of the time of the two: the next measurement may deny less."""


def join(scene: Scene, choice: Choice, ledger: Ledger) -> Choice:
    """`choice` with neighbours joined into one step where that gains, the largest gains first."""
    gains = []
    for unit in stretches(scene.layers, handed_over(scene, choice)):
        nodes = {layer.node for layer in unit}
        for layer in unit:
            joint = scene.joints.get(layer.node)
            if joint is None or joint.before is None or joint.before.node not in nodes:
                continue
            alone, joined = _seconds(scene, layer, joint, choice, ledger)
            if alone - joined > _LEAST_GAIN * alone:
                gains.append((alone - joined, joined, joint.layers(layer), joint))
    found, taken = dict(choice), set[Layer]()
    for _, joined, pair, joint in sorted(gains, key=lambda one: one[0], reverse=True):
        if taken.isdisjoint(pair):
            taken.update(pair)
            first, second = pair
            # The first keeps its own time and the second gets the rest, so the sum is the pair's.
            rest = max(0.0, joined - choice[first.node].seconds)
            found[second.node] = Timed(joint, rest)
    return found


def _seconds(
    scene: Scene, layer: Layer, joint: Implementation, choice: Choice, ledger: Ledger
) -> tuple[float, float]:
    """The time of the two layers as two steps and as one, taken in turns or from the ledger."""
    words = [
        f"{one.spec.key} by {choice[one.node].implementation.name}" for one in joint.layers(layer)
    ]
    key = f"{', '.join(words)}, or {joint.name}"
    known = ledger.get(key)
    if not isinstance(known, list) or len(known) != 2 or not all(map(is_time, known)):
        known = _time(scene, layer, joint, choice)
        ledger.put(key, known)
    return known[0], known[1]


def _time(scene: Scene, layer: Layer, joint: Implementation, choice: Choice) -> list[float]:
    pair, output = joint.layers(layer), [layer.node]
    constants = [scene.constants(one) for one in pair]
    apart = []
    for one, own in zip(pair, constants, strict=True):
        implementation = choice[one.node].implementation
        apart.append((one, implementation, implementation.prepare(*own)))
    joined = [(layer, joint, joint.prepare(*constants[0], *constants[1]))]
    runs = [together(scene.record, parts, output) for parts in (apart, joined)]
    inputs = [sample(scene.record.values[node], None) for node in runs[0][1]]
    assert runs[0][1] == runs[1][1]
    calls = {str(number): (lambda run=run: run(*inputs)) for number, (run, _) in enumerate(runs)}
    times = interleave(calls, rounds=_ROUNDS, between=evictor(scene.graph, constants[1][0]))
    return [min(times[name].seconds) for name in calls]
