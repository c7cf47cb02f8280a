"""Bind chosen kernels into a program: pack weights, put layers of ours together, number slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, fx

from ..formats import CHANNELS_LAST_OF, Format
from ..graph import filled, puts_back, result_may_be_view
from ..graph.nodes.results import is_made, is_returned, returned
from ..kernels.programs.pool import Pool
from ..kernels.tape.pages import WeightShelf, noted, shared, side_by_side
from ..machine.host_memory import trim
from ..operators.kinds import is_pointwise
from .assigning import written
from .implementation import Choice, Implementation, Run, Timed
from .others import caller
from .program import Made, PlanProgram, PlanStep, Slot, with_drops
from .recording import Seen, laid_out, layout_of
from .scene import Scene, views_strange
from .specs import Layer, Linear, OperatorSpec, Weighted
from .stretch import alone, stretches, together

_Key = tuple[fx.Node, "Format | tuple[int, ...] | None"]
"""A value, and the layout or the strides that it was converted to; None for it as it was made.

`Format.OTHER` is an input as the caller gave it, or the tuple of all that a stretch returned.
"""

_TRIMMED = 1 << 24
"""After packing this many bytes of weights, free memory is given back to the system."""


class Packed:
    """The weights that others' kernels packed for one program, so that the next one can reuse them.

    Weights of our kernels are not among them: they lie side by side and are freed all at once.
    """

    def __init__(self) -> None:
        self._runs: dict[tuple[fx.Node, Implementation], tuple[Run, tuple[Tensor, ...]]] = {}

    def begin(self, choice: Choice) -> None:
        """Drop the weights that no kernel of `choice` reads, before others are packed."""
        chosen = {(node, timed.implementation) for node, timed in choice.items()}
        self._runs = {key: run for key, run in self._runs.items() if key in chosen}

    def of(self, layer: Layer, implementation: Implementation, make: Callable[[], Run]) -> Run:
        if implementation.ours:
            return make()
        key = (layer.node, implementation)
        if key not in self._runs:
            with noted() as pieces:
                run = make()
            self._runs[key] = run, tuple(pieces)
        run, kept = self._runs[key]
        for piece in kept:
            # The shelf of the program that packed it may be gone.
            shared(piece)
        return run


def bind(
    scene: Scene, choice: Choice, packed: Packed | None = None, pool: Pool | None = None
) -> PlanProgram:
    """Prepare every chosen kernel's weights and string them together.

    All programs of ours take their memory from `pool`: they run one after the other. What another
    program of that pool has packed is not packed again.
    """
    packed, pool = packed or Packed(), pool or Pool()
    packed.begin(choice)
    # Packed weights are next, and large; what was measured or not chosen is in their way.
    trim()
    with side_by_side(pool.shelves) as shelf:
        pool.add(shelf)
        return _Binder(scene, choice, packed, pool).bind(shelf)


def handed_over(scene: Scene, choice: Choice) -> Choice:
    """`choice`, with torch in place of ours where ours and others would exchange a tuple."""
    choice = dict(choice)
    layers = {layer.node: layer for layer in scene.layers}
    ours = {node for node, timed in choice.items() if timed.implementation.ours}
    several = {node for node in choice if isinstance(scene.record.values[node], tuple)}
    while True:
        mixed = {
            one
            for value in several
            for user in value.users
            for one, other in ((value, user), (user, value))
            if one in ours and other not in ours
        }
        if not mixed:
            return choice
        for node in mixed:
            writes = choice[node].implementation.writes
            choice[node] = Timed(scene.called(layers[node], None, writes), 0.0)
        ours -= mixed


class _Binder:
    """A program under way: the slots of values, and the steps that fill them."""

    def __init__(self, scene: Scene, choice: Choice, packed: Packed, pool: Pool) -> None:
        self.scene, self.packed, self.pool = scene, packed, pool
        self.graph, self.record = scene.graph, scene.record
        self.choice = handed_over(scene, choice)
        self.slots: dict[_Key, int] = {}
        self.steps: list[PlanStep] = []
        self.loose: set[fx.Node] = set()
        """Views of torch's of a value in any layout: theirs is known when they are made."""
        self.unpacked = 0
        self.shown = self._shown()

    def bind(self, shelf: WeightShelf) -> PlanProgram:
        feeds: list[int | None] = []
        constants: dict[int, Any] = {}
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                self._hold(node)
                feeds.append(self._feed(node))
            elif node.op == "get_attr":
                constants[self._hold(node)] = self._numbers(node, _attribute(self.graph, node))
            elif node in self.record.constant:
                made = self._computed(node, constants)
                constants[self._hold(node)] = self._numbers(node, made)
        for unit in stretches(self.scene.layers, self.choice):
            computing, moving = self._without_end(unit)
            if len(computing) > 1:
                self._add_stretch(computing)
            for layer in moving if len(computing) > 1 else unit:
                self._add(layer)
        output = filled(self.graph.graph.output_node().args[0], self._returned)
        back = [
            (self._raw(node.args[0]), self.slots[node.args[1], None])
            for node in self.graph.graph.nodes
            if puts_back(node)
        ]
        steps = with_drops(self.steps, output, back, constants)
        start = [constants.get(slot) for slot in range(len(self.slots))]
        return PlanProgram(steps, start, feeds, output, shelf, back)

    def _without_end(self, unit: Sequence[Layer]) -> tuple[list[Layer], list[Layer]]:
        """The layers of a stretch without those at its ends that only move data, and these.

        A view of torch's costs less than to put in order what nobody of ours reads.
        """
        inside, moving = {layer.node for layer in unit}, set[fx.Node]()
        for layer in reversed(unit):
            one = self.choice[layer.node].implementation
            if one.free and one.moved and (inside - moving).isdisjoint(self._readers(layer)):
                moving.add(layer.node)
        # A program returns no tuple: who takes one apart stays with who makes it.
        kept = inside - moving
        several = {node for node in kept if isinstance(self.record.values[node], tuple)}
        moving -= {layer.node for layer in unit if not several.isdisjoint(layer.inputs)}
        return (
            [layer for layer in unit if layer.node not in moving],
            [layer for layer in unit if layer.node in moving],
        )

    def _readers(self, layer: Layer) -> set[fx.Node]:
        return self.scene.readers.get(layer.node, set())

    def _shown(self) -> set[fx.Node]:
        """Calls of torch's whose strides the caller gets to see, as no layout says them.

        A part of a returned list, or a diagonal, has the strides that its input gives it. So these
        calls read every value as the graph lays it.
        """
        layers = {layer.node: layer for layer in self.scene.layers}
        found: set[fx.Node] = set()
        waiting = list(returned(self.graph.graph))
        while waiting:
            node = waiting.pop()
            if node not in layers or node in found:
                continue
            one = self.choice[node].implementation
            if (one.free or not one.ours) and not self._is_said(layers[node]):
                found.add(node)
                waiting += layers[node].inputs
        return found

    def _is_said(self, layer: Layer) -> bool:
        """Whether a layout says all strides of what a call of torch's returns, or it makes its own.

        A view has strides from what it views, a stack from what it stacks, and arithmetic keeps
        those of rows and columns.
        """
        seen, read = self.record.tensor(layer.node), map(self.record.tensor, layer.inputs)
        if isinstance(layer.spec, Weighted):
            return True
        if seen is None or result_may_be_view(layer.node):
            return False
        shapes = [one.shape for one in read if one is not None]
        ranks = {len(shape) for shape in shapes if len(shape) in CHANNELS_LAST_OF}
        if self.record.image(layer.node) is None:
            return seen.shape not in shapes and all(rank > len(seen.shape) for rank in ranks)
        return ranks <= {len(seen.shape)}

    def _computed(self, node: fx.Node, constants: dict[int, Any]) -> Any:
        """What a node makes of constants and fixed values alone, or of a tensor's shape."""
        run = caller(self.graph, self.record, node)
        return run(*(self._known(one, constants) for one in self.record.read_by(node)))

    def _known(self, node: fx.Node, constants: dict[int, Any]) -> Any:
        if self.record.is_given(node):
            return constants[self.slots[node, None]]
        seen = self.record.values[node]
        made = torch.empty(seen.shape, dtype=seen.dtype, device=seen.device)
        return laid_out(made, seen.layout) if seen.layout else made

    def _numbers(self, node: fx.Node, value: Any) -> Any:
        return value.float() if node in self.record.whole else value

    def _feed(self, node: fx.Node) -> int | None:
        """The slot an input goes to, through a step that gives it the layout planned for."""
        seen = self.record.image(node)
        if node in self.record.fixed:
            return None
        if seen is None or seen.layout is None:
            return self.slots[node, None]
        raw = self.slots.setdefault((node, Format.OTHER), len(self.slots))
        self._step(f"{node.name} as planned", _converter(seen.layout), (raw,), (node, None))
        return raw

    def _add(self, layer: Layer) -> None:
        one = self.choice[layer.node].implementation
        inputs = tuple(self._given(node, layer, one.reads) for node in layer.inputs)
        if one.free or self._is_unsure(layer, one):
            self.loose.add(layer.node)
        if one.free:
            # Outside of a program, torch's view takes the place of a note of where data lies.
            one = self.scene.called(layer, one.reads, one.writes)
        constants = lambda: self._constants(one, layer)
        make = lambda: alone(self.record, layer, one, constants(), self.pool, self._lies)
        self._step(layer.name, self.packed.of(layer, one, make), inputs, (layer.node, None))

    def _is_unsure(self, layer: Layer, one: Implementation) -> bool:
        """Whether another's kernel may write another layout than it wrote in trials.

        It goes by the strides of what it reads. Whoever made an image of one channel or one pixel
        chose these. Arithmetic goes by its other operand, if that says a layout.
        """
        if one.ours or one.writes is None:
            return False
        images = filter(None, map(self.record.image, layer.inputs))
        silent = [seen.layout is None for seen in images]
        pointwise = isinstance(layer.spec, OperatorSpec) and is_pointwise(layer.spec.name)
        unsaid = bool(silent) and all(silent) if pointwise else any(silent)
        return one.reads is None or unsaid

    def _add_stretch(self, layers: Sequence[Layer]) -> None:
        """One program for all of `layers`; it reads its inputs in whatever layout they have."""
        inside = {layer.node for layer in layers}
        self.shown -= inside
        outputs = [layer.node for layer in layers if self._readers(layer) - inside]
        chosen = {layer: self.choice[layer.node].implementation for layer in layers}
        joined = {one.before for one in chosen.values()}
        parts = [
            (layer, one, partial(self._prepared, one, layer))
            for layer, one in chosen.items()
            if layer not in joined
        ]
        run, read = together(self.record, parts, outputs, self.pool, self._lies)
        name = f"{layers[0].name} to {layers[-1].name}"
        inputs = tuple(self.slots[node, None] for node in read)
        if len(outputs) == 1:
            self._step(name, run, inputs, (outputs[0], None))
            return
        self._step(name, run, inputs, (layers[-1].node, Format.OTHER))
        held = (self.slots[layers[-1].node, Format.OTHER],)
        for index, node in enumerate(outputs):
            self._step(f"{node.name} of {name}", itemgetter(index), held, (node, None))

    def _lies(self, node: fx.Node) -> Format | None:
        """The layout in which a value is found, if that is known."""
        return None if node in self.loose else written(self.choice, self.record, node)

    def _prepared(self, implementation: Implementation, layer: Layer) -> Any:
        return implementation.prepare(*self._constants(implementation, layer))

    def _constants(self, implementation: Implementation, layer: Layer) -> list[Any]:
        """The weights that it prepares; memory that packing others left is given back first."""
        found: list[Any] = []
        for one in implementation.layers(layer):
            constants = self._unless_known(implementation, one)
            found += constants
            self.unpacked += constants[0].nbytes if constants else 0
            if self.unpacked > _TRIMMED:
                trim()
                self.unpacked = 0
        return found

    def _unless_known(self, implementation: Implementation, layer: Layer) -> tuple[Any, ...]:
        """The constants of a layer; what is read where it lies is there once for all programs."""
        constants = self.scene.constants(layer)
        in_place = implementation.ours or isinstance(layer.spec, Linear)
        if not constants or implementation.copies > 0 or not in_place:
            return constants
        weight, *rest = constants
        own: Any = self.graph.get_submodule(layer.op or "").weight
        # The model's own weight may be written to; a copy of it that was read from a file is not.
        return (weight if weight.data_ptr() == own.data_ptr() else shared(weight), *rest)

    def _given(self, node: fx.Node, layer: Layer, layout: Format | None) -> int:
        """The slot that a layer reads: an input as it was given, where the result may share it."""
        if node in self.record.strange and views_strange(self.record, layer):
            return self._raw(node)
        if {node, layer.node} <= self.record.beside:
            return self.slots[node, None]
        if layer.node not in self.shown:
            return self._read(node, layout)
        seen = self.record.image(node)
        slot = self._read(node, seen.layout if seen else None)
        made = node in self.choice and node not in self.shown
        return self._as_laid(node, slot) if made else slot

    def _raw(self, node: fx.Node) -> int:
        """The slot of a value in no layout of ours, as it was given or made."""
        return self.slots.get((node, Format.OTHER), self.slots[node, None])

    def _read(self, node: fx.Node, layout: Format | None) -> int:
        """The slot of a value in `layout`, converting it there the first time."""
        seen, has = self.record.values.get(node), written(self.choice, self.record, node)
        known = has in (None, layout) and node not in self.loose
        if layout is None or known or not isinstance(seen, Seen):
            return self.slots[node, None]
        if len(seen.shape) not in CHANNELS_LAST_OF or seen.layout is None:
            return self.slots[node, None]
        if (node, layout) not in self.slots:
            held = (self.slots[node, None],)
            convert = _settler(layout) if has == layout else _converter(layout)
            self._step(f"{node.name} to {layout}", convert, held, (node, layout))
        return self.slots[node, layout]

    def _returned(self, node: fx.Node) -> Any:
        """Return a fixed value as it is, and for other nodes their slot, in the graph's layout."""
        if is_made(node):
            held: Any = filled((node.target, node.args, node.kwargs), self._returned)
            return Made(*held)
        if node in self.record.fixed:
            return self.record.values[node]
        if node in self.record.strange:
            return Slot(self._raw(node))
        if node in self.shown:
            return Slot(self.slots[node, None])
        seen = self.record.image(node)
        slot = self._read(node, seen.layout if seen else None)
        return Slot(self._as_laid(node, slot))

    def _as_laid(self, node: fx.Node, slot: int) -> int:
        """The slot of a value with the strides that the graph gives it, if no layout says them."""
        strides = self.record.strides.get(node)
        if strides is None:
            return slot
        if (node, strides) not in self.slots:
            name = f"{node.name} as the graph lays it"
            self._step(name, partial(_in_strides, strides), (slot,), (node, strides))
        return self.slots[node, strides]

    def _step(self, name: str, run: Run, inputs: tuple[int, ...], key: _Key) -> None:
        output = self.slots.setdefault(key, len(self.slots))
        self.steps.append(PlanStep(name, run, inputs, output, ()))

    def _hold(self, node: fx.Node) -> int:
        return self.slots.setdefault((node, None), len(self.slots))


def _converter(layout: Format) -> Callable[[Tensor], Tensor]:
    if layout is not Format.CHANNELS_LAST:
        return lambda x: x.contiguous()
    of_images, of_volumes = torch.channels_last, torch.channels_last_3d
    return lambda x: x.contiguous(memory_format=of_volumes if x.ndim == 5 else of_images)


def _settler(layout: Format) -> Callable[[Tensor], Tensor]:
    """A converter that leaves slices as they are, as the plan does elsewhere."""
    return lambda x: x if layout_of(x) in (layout, None) else laid_out(x, layout)


def _in_strides(strides: tuple[int, ...], x: Tensor) -> Tensor:
    if x.stride() == strides:
        return x
    if all(a == b or n == 1 for a, b, n in zip(x.stride(), strides, x.shape, strict=True)):
        return x.as_strided(x.shape, strides)
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def _attribute(graph: fx.GraphModule, node: fx.Node) -> Any:
    """What the node reads; the parameter itself, if that is returned."""
    found = attrgetter(str(node.target))(graph)
    kept = is_returned(node) or not isinstance(found, Tensor)
    return found if kept else found.detach()
