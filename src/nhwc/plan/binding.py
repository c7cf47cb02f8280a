"""From chosen kernels to a program: weights packed, layers of ours together, slots numbered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from ..formats import Format
from ..kernels.tape.pages import side_by_side
from ..release import trim
from .assigning import Choice, written
from .calls import caller
from .candidates import Candidate, Run, candidates_of, natives_of
from .options import Option
from .program import Program, Slot, Step, with_drops
from .recording import Record, Seen
from .specs import Layer, Operator, constants_of

if TYPE_CHECKING:
    from ..kernels.programs.program import Pool
    from .native.kernel import Native

_TRIMMED = 1 << 24
"""After so many bytes of weights, what packing left is given back to the system."""


class Packed:
    """What others' kernels packed for one program: the next of the same graph takes what it can.

    What ours pack lies side by side, and is free only when all of it is.
    """

    def __init__(self) -> None:
        self._runs: dict[tuple[fx.Node, Option], Run] = {}

    def begin(self, choice: Choice) -> None:
        """Let go of what no kernel of `choice` reads, before others are packed."""
        chosen = set(choice.items())
        self._runs = {key: run for key, run in self._runs.items() if key in chosen}

    def of(self, layer: Layer, option: Option, make: Callable[[], Run]) -> Run:
        if option.native:
            return make()
        key = (layer.node, option)
        if key not in self._runs:
            self._runs[key] = make()
        return self._runs[key]


def bind(
    graph: fx.GraphModule,
    record: Record,
    layers: Sequence[Layer],
    choice: Choice,
    packed: Packed | None = None,
) -> Program:
    """Prepare every chosen kernel's weights and string them together."""
    packed = packed or Packed()
    packed.begin(choice)
    with side_by_side():
        return _Binder(graph, record, choice, packed).bind(layers)


def stretches(layers: Sequence[Layer], choice: Choice) -> list[list[Layer]]:
    """The layers in an order in which they can run, those of our kernels together where possible.

    Each layer of another's kernel is alone. By turns, all that can run of one kind runs.
    """
    rest, units = list(layers), []
    waiting = {layer.node for layer in layers}
    native = False
    while rest:
        chosen, later = [], []
        for layer in rest:
            ready = waiting.isdisjoint(layer.inputs)
            if ready and choice[layer.node].native is native:
                chosen.append(layer)
                waiting.discard(layer.node)
            else:
                later.append(layer)
        if native and chosen:
            units.append(chosen)
        else:
            units += [[layer] for layer in chosen]
        rest, native = later, not native
    return units


def _handed_over(record: Record, choice: Choice) -> Choice:
    """`choice`, with several tensors at once left to torch where its kernels give or take them."""
    choice = dict(choice)
    mixed = True
    while mixed:
        mixed = False
        for value, user in [(v, u) for v in choice for u in v.users if u in choice]:
            if isinstance(record.values[value], tuple):
                for ours, other in ((value, user), (user, value)):
                    if choice[ours].native and not choice[other].native:
                        choice[ours] = Option("torch", None, choice[ours].writes, 0.0)
                        mixed = True
        for value in choice:
            outside = [u for u in value.users if u not in choice]
            if outside and choice[value].native and isinstance(record.values[value], tuple):
                choice[value] = Option("torch", None, choice[value].writes, 0.0)
                mixed = True
    return choice


class _Binder:
    def __init__(
        self, graph: fx.GraphModule, record: Record, choice: Choice, packed: Packed
    ) -> None:
        self.graph, self.record, self.packed = graph, record, packed
        self.choice = _handed_over(record, choice)
        self.pool: Pool | None = None
        self.slots: dict[tuple[fx.Node, Format | None], int] = {}
        self.steps: list[Step] = []
        self.unpacked = 0

    def bind(self, layers: Sequence[Layer]) -> Program:
        feeds: list[int | None] = []
        constants: dict[int, Any] = {}
        for node in self.graph.graph.nodes:
            if node.op == "placeholder":
                self._hold(node)
                feeds.append(self._feed(node))
            elif node.op == "get_attr":
                constants[self._hold(node)] = _attribute(self.graph, str(node.target))
        for unit in stretches(layers, self.choice):
            if len(unit) > 1:
                self._add_stretch(unit)
            else:
                self._add(unit[0])
        (result,) = self.graph.graph.find_nodes(op="output")
        output = fx.node.map_arg(result.args[0], self._returned)
        steps = with_drops(self.steps, output, constants)
        program = Program(steps, len(self.slots), feeds, output)
        for slot, value in constants.items():
            program.constant(slot, value)
        return program

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
        option = self.choice[layer.node]
        inputs = tuple(self._read(node, option.reads) for node in layer.inputs)
        candidates = candidates_of(self.graph, self.record, layer)
        named = [c for c in candidates if (c.name, c.reads) == (option.kernel, option.reads)]
        # What is free within a program is torch's view outside of one.
        if not named or named[0].free:
            run = caller(self.graph, self.record, layer)
        else:
            run = self.packed.of(layer, option, lambda: self._prepared(named[0], layer))
        self._step(layer.name, run, inputs, (layer.node, None))

    def _add_stretch(self, layers: Sequence[Layer]) -> None:
        """One program for all of `layers`; it reads its inputs in whatever layout they have."""
        from ..kernels.programs.program import Pool
        from .native.pairs import pairs_in
        from .native.stretch import Stretch

        # One runs after the other.
        self.pool = self.pool or Pool()
        inside = {layer.node for layer in layers}
        outputs = [layer.node for layer in layers if set(layer.node.users) - inside]
        stretch = Stretch(outputs)
        pairs = {
            pair.second.node: pair
            for pair in pairs_in(layers, self.record)
            if pair.kernel == self.choice[pair.second.node].kernel
        }
        within = {pair.first.node for pair in pairs.values()}
        for layer in layers:
            if layer.node in within:
                continue
            if layer.node in pairs:
                pair = pairs[layer.node]
                native = pair.native(self._constants(pair.first), self.record)
                layer = pair.layer
            else:
                natives = natives_of(self.graph, self.record, layer)
                kernel = self.choice[layer.node].kernel
                native = next(one for one in natives if one.name == kernel)
            stretch.add(native, layer, self._packed(native, layer), self.record)
        name = f"{layers[0].name} to {layers[-1].name}"
        inputs = tuple(self.slots[node, None] for node in stretch.inputs)
        run = stretch.build(self.record, self.pool)
        if len(outputs) == 1:
            self._step(name, run, inputs, (outputs[0], None))
            return
        self._step(name, run, inputs, (layers[-1].node, Format.OTHER))
        held = (self.slots[layers[-1].node, Format.OTHER],)
        for index, node in enumerate(outputs):
            self._step(f"{node.name} of {name}", itemgetter(index), held, (node, None))

    def _prepared(self, candidate: Candidate, layer: Layer) -> Run:
        if isinstance(layer.spec, Operator):
            return candidate.prepare(None, None)
        return candidate.prepare(*self._constants(layer))

    def _packed(self, native: Native, layer: Layer) -> Any:
        if isinstance(layer.spec, Operator):
            return None
        return native.pack(self._constants(layer))

    def _constants(self, layer: Layer) -> tuple[Tensor, Tensor | None]:
        """The layer's weights, after what packing others left was given back."""
        constants = constants_of(self.graph, layer)
        self.unpacked += constants[0].nbytes
        if self.unpacked > _TRIMMED:
            trim()
            self.unpacked = 0
        return constants

    def _read(self, node: fx.Node, layout: Format | None) -> int:
        """The slot of a value in `layout`, converting it there the first time."""
        seen, has = self.record.values.get(node), written(self.choice, self.record, node)
        if layout is None or has in (None, layout) or not isinstance(seen, Seen):
            return self.slots[node, None]
        if len(seen.shape) != 4 or seen.layout is None:
            return self.slots[node, None]
        if (node, layout) not in self.slots:
            held = (self.slots[node, None],)
            self._step(f"{node.name} to {layout}", _converter(layout), held, (node, layout))
        return self.slots[node, layout]

    def _returned(self, node: fx.Node) -> Any:
        """What the caller gets: fixed values as they are, images in the graph's own layout."""
        if node in self.record.fixed:
            return self.record.values[node]
        seen = self.record.image(node)
        return Slot(self._read(node, seen.layout if seen else None))

    def _step(
        self,
        name: str,
        run: Callable[..., Any],
        inputs: tuple[int, ...],
        key: tuple[fx.Node, Format | None],
    ) -> None:
        output = self.slots.setdefault(key, len(self.slots))
        self.steps.append(Step(name, run, inputs, output, ()))

    def _hold(self, node: fx.Node) -> int:
        return self.slots.setdefault((node, None), len(self.slots))


def _converter(layout: Format) -> Callable[[Tensor], Tensor]:
    last = layout is Format.CHANNELS_LAST
    memory_format = torch.channels_last if last else torch.contiguous_format
    return lambda x: x.contiguous(memory_format=memory_format)


def _attribute(graph: fx.GraphModule, name: str) -> Any:
    owner, _, leaf = name.rpartition(".")
    found = getattr(graph.get_submodule(owner), leaf)
    return found.detach() if isinstance(found, Tensor) else found
