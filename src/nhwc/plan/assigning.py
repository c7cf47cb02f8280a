"""Choose one implementation per layer so that these and the conversions in between cost least.

Implementations differ in the layouts they read and write, so the choice for a layer depends on its
neighbours: a contiguous kernel that wins alone may lose by the two copies around it, and one of
torch's by the two ways out of our program and back. The sum is lowered from three starting points,
by changing single layers, stretches of layers that only pass a layout on, and islands, whose layers
are all ours or all others'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from ..formats import CHANNELS_LAST_OF, Format
from .implementation import Choice, Timed, Timings
from .recording import Record, Seen
from .scene import Scene
from .specs import Layer, OperatorSpec


def assign(
    scene: Scene, timings: Timings, conversion: Callable[[Seen], float], switch: float = 0.0
) -> Choice:
    """The cheapest choice found among `timings`.

    `conversion` tells what a copy into the other layout costs, `switch` what it costs to go from
    kernels of ours to others, or back.
    """
    problem = _Problem(scene, timings, conversion, switch)
    starts = [
        {layer.node: _preferred(timings[layer.node], layout) for layer in scene.layers}
        for layout in (None, Format.CHANNELS_LAST, Format.CONTIGUOUS)
    ]
    for choice in starts:
        _descend(problem, choice)
    return min(starts, key=lambda choice: problem.cost(choice, scene.layers))


def cost(
    scene: Scene, choice: Choice, conversion: Callable[[Seen], float], switch: float = 0.0
) -> float:
    """The seconds of `choice`: of its kernels, and of what lies between them."""
    timings: Timings = {node: (timed,) for node, timed in choice.items()}
    return _Problem(scene, timings, conversion, switch).cost(choice, scene.layers)


class _Problem:
    """A scene and its timings: what a choice costs, and who is next to whom."""

    def __init__(
        self, scene: Scene, timings: Timings, conversion: Callable[[Seen], float], switch: float
    ) -> None:
        self.layers, self.record, self.timings = scene.layers, scene.record, timings
        self.readers = scene.readers
        self.switch = switch
        self._conversion = conversion
        self._by_node = {layer.node: layer for layer in scene.layers}
        self._seconds: dict[Seen, float] = {}

    def cost(self, choice: Choice, layers: Sequence[Layer]) -> float:
        """The part of the sum that these layers decide: their kernels, and copies next to them."""
        kernels = sum(choice[layer.node].seconds for layer in layers)
        values = {value for layer in layers for value in (*layer.inputs, layer.node)}
        return kernels + sum(self._conversions(choice, value) for value in values)

    def neighbours(self, layer: Layer) -> list[Layer]:
        nodes = [*layer.inputs, *self.readers.get(layer.node, ())]
        return [self._by_node[node] for node in nodes if node in self._by_node]

    def _conversions(self, choice: Choice, value: fx.Node) -> float:
        """A value is converted once, however many read it in the other layout."""
        seen, has = self.record.values.get(value), written(choice, self.record, value)
        source, switches, converts = choice.get(value), False, False
        for reader in self.readers.get(value, ()):
            if reader in choice:
                one = choice[reader].implementation
                switches |= source is not None and source.implementation.ours != one.ours
                converts |= has is not None and one.reads not in (has, None)
        if not isinstance(seen, Seen):
            # Several tensors at once cannot be converted or handed over: a whole second forbids it.
            return 1.0 if switches or converts else 0.0
        switch = self.switch if switches else 0.0
        return switch + (self._copy_seconds(seen) if converts else 0.0)

    def _copy_seconds(self, seen: Seen) -> float:
        if len(seen.shape) not in CHANNELS_LAST_OF or seen.layout is None:
            return 0.0
        if seen not in self._seconds:
            self._seconds[seen] = self._conversion(seen)
        return self._seconds[seen]


def written(choice: Choice, record: Record, value: fx.Node) -> Format | None:
    """The layout in which the readers of a value find it."""
    if value in choice:
        return choice[value].implementation.writes
    seen = record.values.get(value)
    return seen.layout if isinstance(seen, Seen) else None


def _preferred(timed: tuple[Timed, ...], layout: Format | None) -> Timed:
    def cost(one: Timed) -> tuple[bool, float]:
        other = layout is not None and one.implementation.reads not in (layout, None)
        return other, one.seconds

    return min(timed, key=cost)


def _descend(problem: _Problem, choice: Choice) -> None:
    stretches = _free_regions(problem)
    for _ in range(10):
        changed = False
        for layer in problem.layers:
            changed |= _improve_one(problem, choice, layer)
        for stretch in stretches:
            changed |= _improve_stretch(problem, choice, stretch)
        for island in _islands(problem, choice):
            changed |= _improve_island(problem, choice, island)
        if not changed:
            return


def _improve_one(problem: _Problem, choice: Choice, layer: Layer) -> bool:
    timed = problem.timings[layer.node]
    if len(timed) == 1:
        return False
    before = choice[layer.node]
    costs = []
    for one in timed:
        choice[layer.node] = one
        costs.append(problem.cost(choice, [layer]))
    best = min(range(len(timed)), key=costs.__getitem__)
    # Equal costs keep what is there, or the search would never end.
    keep = costs[timed.index(before)] <= costs[best]
    choice[layer.node] = before if keep else timed[best]
    return not keep


def _improve_stretch(problem: _Problem, choice: Choice, stretch: list[Layer]) -> bool:
    ways = [
        {layer.node: _preferred(problem.timings[layer.node], layout) for layer in stretch}
        for layout in (Format.CHANNELS_LAST, Format.CONTIGUOUS)
    ]
    return any(_improves(problem, choice, stretch, way) for way in ways)


def _improve_island(problem: _Problem, choice: Choice, island: list[Layer]) -> bool:
    ours = not choice[island[0].node].implementation.ours
    over = {layer.node: _best_of(problem.timings[layer.node], ours) for layer in island}
    return _improves(problem, choice, island, {node: one for node, one in over.items() if one})


def _improves(problem: _Problem, choice: Choice, layers: list[Layer], way: Choice) -> bool:
    """Whether these layers cost less that way; if not, they stay as they are."""
    before = {layer.node: choice[layer.node] for layer in layers}
    cost = problem.cost(choice, layers)
    choice.update(way)
    if problem.cost(choice, layers) < cost:
        return True
    choice.update(before)
    return False


def _free_regions(problem: _Problem) -> list[list[Layer]]:
    """Neighbouring layers that can work in either layout and have no weights to pack."""
    free = [
        layer
        for layer in problem.layers
        if isinstance(layer.spec, OperatorSpec) and len(problem.timings[layer.node]) > 1
    ]
    return _connected(problem, free)


def _islands(problem: _Problem, choice: Choice) -> list[list[Layer]]:
    """Neighbouring layers by kernels of ours, or of others, which all could go to the other side.

    To go alone each would have to pay for a border of its own.
    """
    sides: dict[bool, list[Layer]] = {True: [], False: []}
    for layer in problem.layers:
        ours = choice[layer.node].implementation.ours
        if _best_of(problem.timings[layer.node], not ours):
            sides[ours].append(layer)
    return [island for side in sides.values() for island in _connected(problem, side)]


def _best_of(timed: tuple[Timed, ...], ours: bool) -> Timed | None:
    some = [one for one in timed if one.implementation.ours is ours]
    return min(some, key=lambda one: one.seconds, default=None)


def _connected(problem: _Problem, layers: Sequence[Layer]) -> list[list[Layer]]:
    """The groups of two or more of these layers that are neighbours."""
    free = {layer.node: layer for layer in layers}
    found = []
    while free:
        _, first = free.popitem()
        group, edge = [first], [first]
        while edge:
            for other in problem.neighbours(edge.pop()):
                if other.node in free:
                    del free[other.node]
                    group.append(other)
                    edge.append(other)
        if len(group) > 1:
            found.append(group)
    return found
