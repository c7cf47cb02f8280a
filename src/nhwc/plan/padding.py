"""Padding in front of convolutions, which a convolution can do itself.

A pad of its own writes the whole image once more, and reads it; a kernel only has to know where the
image ends. Models pad so where the zeros in front are not those behind: causal convolutions of
video, TensorFlow's "same". Some put the first frame of a video in front of it again, by `F.pad`
with mode "replicate" or by `cat`; then the frames beside the volume are those at its ends, `held`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules import padding

from ..graph import bound, module_of, puts_back
from ..graph.modules.leaves import runs_hooks
from ..graph.modules.mended import CircularPad
from ..graph.modules.ordered import Repeat
from ..graph.nodes.results import only_holds
from .recording import Record
from .specs import Convolution, Layer

PADDING: dict[type[nn.Module], str] = {
    padding._ConstantPadNd: "constant",
    padding._ReflectionPadNd: "reflect",
    padding._ReplicationPadNd: "replicate",
    padding._CircularPadNd: "circular",
    CircularPad: "circular",
}
"""The modules that pad, and do nothing else, with the word that F.pad has for it."""

_REPEATING = ("repeat", "expand", "repeat_interleave", torch.repeat_interleave)


@dataclass(frozen=True)
class _Pads:
    """What is put beside each side of `source`: zeros, or if `held` its first and last frame."""

    source: fx.Node
    front: tuple[int, ...]
    behind: tuple[int, ...]
    held: bool = False

    def within(self, spec: Convolution) -> Convolution | None:
        """`spec` as it reads `source`; None if no convolution is both."""
        # Beyond the frames that are held there cannot be zeros as well.
        if spec.held or (self.held and (spec.padding[0] or (spec.behind or (0,))[0])):
            return None
        front = _sum(spec.padding, self.front)
        behind = _sum(spec.behind or spec.padding, self.behind)
        pads = zip(spec.input[2:], self.front, self.behind, strict=True)
        return replace(
            spec,
            input=(*spec.input[:2], *(size - one - other for size, one, other in pads)),
            padding=front,
            behind=None if behind == front else behind,
            held=self.held,
        )


def pad_arguments(module: nn.Module) -> dict[str, Any] | None:
    """The arguments of F.pad for a module that pads, and does nothing else."""
    mode = next((mode for kind, mode in PADDING.items() if isinstance(module, kind)), None)
    if mode is None:
        return None
    return {"pad": module.padding, "mode": mode, "value": getattr(module, "value", None)}


def readers_of(graph: fx.GraphModule, layers: Iterable[Layer]) -> dict[fx.Node, set[fx.Node]]:
    """The nodes that read each value while a plan runs: layers, and what ends the graph."""
    nodes = graph.graph.nodes
    ends = [n for n in nodes if n.op == "output" or puts_back(n) or only_holds(n)]
    found: dict[fx.Node, set[fx.Node]] = {}
    pairs = (*((x, x.all_input_nodes) for x in ends), *((x.node, x.inputs) for x in layers))
    for reader, values in pairs:
        for value in values:
            found.setdefault(value, set()).add(reader)
    return found


def without_pads(graph: fx.GraphModule, record: Record, layers: Sequence[Layer]) -> list[Layer]:
    """`layers` without those that pad for convolutions alone, which now pad themselves."""
    readers, by_node = readers_of(graph, layers), {layer.node: layer for layer in layers}
    # The last pad of a row goes first: behind it there is a convolution.
    for layer in reversed(layers):
        pads = _pads(record, layer)
        taken = pads and _taken(pads, layer.node, readers.get(layer.node, set()), by_node)
        if not pads or not taken:
            continue
        by_node |= taken
        readers.setdefault(pads.source, set()).update(taken)
        _drop(layer, by_node, readers)
    return [by_node[layer.node] for layer in layers if layer.node in by_node]


def _taken(
    pads: _Pads, node: fx.Node, readers: set[fx.Node], layers: Mapping[fx.Node, Layer]
) -> dict[fx.Node, Layer] | None:
    """The layers that read a pad's result as they are without it; None if one needs it."""
    found = {}
    for reader in readers:
        layer = layers.get(reader)
        if layer is None or not isinstance(layer.spec, Convolution) or node in layer.inputs[1:]:
            return None
        spec = pads.within(layer.spec)
        if spec is None:
            return None
        found[reader] = replace(layer, spec=spec, inputs=(pads.source, *layer.inputs[1:]))
    return found


def _drop(layer: Layer, layers: dict[fx.Node, Layer], readers: dict[fx.Node, set[fx.Node]]) -> None:
    """Take out a layer that nobody reads any more, and those that it alone read."""
    del layers[layer.node]
    for value in layer.inputs:
        readers[value].discard(layer.node)
        if not readers[value] and value in layers:
            _drop(layers[value], layers, readers)


def _pads(record: Record, layer: Layer) -> _Pads | None:
    node = layer.node
    if node.target in (torch.cat, torch.concat, torch.concatenate):
        return _joined_ends(record, node)
    given = _given(record, node)
    seen = record.image(layer.inputs[0]) if given and len(layer.inputs) == 1 else None
    if given is None or seen is None:
        return None
    ends, sides = given.get("pad"), len(seen.shape) - 2
    plain = isinstance(ends, list | tuple) and all(type(n) is int and n >= 0 for n in ends)
    if not plain or len(ends) > 2 * sides:  # type: ignore[arg-type]
        return None
    # torch names the last side first.
    ends = [*ends, *[0] * (2 * sides - len(ends))]  # type: ignore[misc, arg-type]
    front, behind = tuple(ends[-2::-2]), tuple(ends[-1::-2])
    mode = given.get("mode", "constant")
    zeros = mode == "constant" and given.get("value") in (None, 0)
    held = mode == "replicate" and sides == 3 and not any((*front[1:], *behind[1:]))
    return _Pads(layer.inputs[0], front, behind, held) if zeros or held else None


def _given(record: Record, node: fx.Node) -> dict[str, Any] | None:
    """The arguments of F.pad that a node is called with, besides the tensor."""
    module = module_of(node)
    if module is not None:
        return None if runs_hooks(module) else pad_arguments(module)
    if node.target is not F.pad:
        return None
    given = bound(node, ("input", "pad", "mode", "value"))
    del given["input"]
    return {name: fx.node.map_arg(value, record.known) for name, value in given.items()}


def _joined_ends(record: Record, node: fx.Node) -> _Pads | None:
    """A volume behind copies of its first frame, before copies of its last one, or both."""
    given = bound(node, ("tensors", "dim"))
    parts, out = given.get("tensors"), record.image(node)
    if given.get("dim") not in (2, -3) or out is None or len(out.shape) != 5:
        return None
    if not isinstance(parts, list | tuple) or not all(isinstance(one, fx.Node) for one in parts):
        return None
    ends = [_frame(record, one) for one in parts]
    whole = [number for number, end in enumerate(ends) if end is None]
    if len(whole) != 1 or len(parts) < 2:
        return None
    (place,) = whole
    volume = parts[place]
    before, after = set(ends[:place]), set(ends[place + 1 :])
    last = record.values[volume].shape[2] - 1
    if not before <= {(volume, 0)} or not after <= {(volume, last)}:
        return None
    count = lambda some: sum(record.values[one].shape[2] for one in some)
    front, behind = count(parts[:place]), count(parts[place + 1 :])
    return _Pads(volume, (front, 0, 0), (behind, 0, 0), held=True)


def _frame(record: Record, node: fx.Node) -> tuple[fx.Node, int] | None:
    """The volume of which `node` is one frame, once or several times, and that frame's number."""
    source = node.args[0] if node.args else None
    mine = record.image(node)
    theirs = record.image(source) if isinstance(source, fx.Node) else None
    if mine is None or theirs is None or len(mine.shape) != 5 or len(theirs.shape) != 5:
        return None
    if node.target in _REPEATING or type(module_of(node)) is Repeat:
        # `cat` takes parts whose other sides are the volume's: none of these grew.
        return _frame(record, source)  # type: ignore[arg-type]
    index = node.args[1] if node.target is getitem else None
    whole = slice(None)
    if not isinstance(index, tuple) or mine.shape[2] != 1 or len(index) < 3:
        return None
    others = (*index[:2], *index[3:])
    if any(one not in (whole, Ellipsis) for one in others) or Ellipsis in index[:2]:
        return None
    taken = index[2]
    if not isinstance(taken, slice) or any(
        not isinstance(end, int | None) for end in (taken.start, taken.stop, taken.step)
    ):
        return None
    return source, range(theirs.shape[2])[taken][0]  # type: ignore[return-value]


def _sum(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))
