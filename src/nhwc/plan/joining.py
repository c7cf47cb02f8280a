"""Compute neighbouring layers of our kernels as one step, where that is faster here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..machine.timing import SAME, interleave
from .binding import handed_over
from .evidence import Evidence, RivalTime, Sitting
from .implementation import Choice, Implementation, Timed
from .ledger import Ledger
from .measuring import Leisure, sat
from .scene import Scene
from .specs import Layer
from .stretch import stretches, together
from .trials import evictor, sample

_ROUNDS = 30
_APART, _JOINED = "apart", "joined"


def join(scene: Scene, choice: Choice, ledger: Ledger, leisure: Leisure) -> Choice:
    """`choice` with neighbours joined into one step where that gains, the largest gains first."""
    gains = []
    ask = partial(sat, ledger, leisure)
    for unit in stretches(scene.layers, handed_over(scene, choice)):
        nodes = {layer.node for layer in unit}
        for layer in unit:
            joint = scene.joints.get(layer.node)
            if joint is None or joint.before is None or joint.before.node not in nodes:
                continue
            alone, joined = _seconds(scene, layer, joint, choice, ask)
            # The next measurement may deny a smaller gain.
            if alone > (1 + SAME) * joined:
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
    scene: Scene,
    layer: Layer,
    joint: Implementation,
    choice: Choice,
    ask: Callable[..., Evidence],
) -> tuple[float, float]:
    """The time of the two layers as two steps and as one, taken in turns or from the ledger."""
    words = [
        f"{one.spec.key} by {choice[one.node].implementation.name}" for one in joint.layers(layer)
    ]
    key = f"{', '.join(words)}, or {joint.name}"
    hold = lambda: _hold(scene, layer, joint, choice)
    found = ask(key, (_APART, _JOINED), hold).seconds
    return found[_APART], found[_JOINED]


def _hold(scene: Scene, layer: Layer, joint: Implementation, choice: Choice) -> Sitting:
    pair, output = joint.layers(layer), [layer.node]
    constants = [scene.constants(one) for one in pair]
    apart = []
    for one, own in zip(pair, constants, strict=True):
        implementation = choice[one.node].implementation
        apart.append((one, implementation, partial(implementation.prepare, *own)))
    joined = [(layer, joint, partial(joint.prepare, *constants[0], *constants[1]))]
    runs = [together(scene.record, parts, output) for parts in (apart, joined)]
    inputs = [sample(scene.record.values[node], None) for node in runs[0][1]]
    assert runs[0][1] == runs[1][1]
    named = zip((_APART, _JOINED), runs, strict=True)
    calls = {name: (lambda run=run: run(*inputs)) for name, (run, _) in named}
    taken = interleave(calls, rounds=_ROUNDS, between=evictor(scene.graph, constants[1][0]))
    return {name: RivalTime.of(samples.seconds) for name, samples in taken.items()}
