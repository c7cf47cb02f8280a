"""Run a graph once and note what every node returned: shapes, layouts, and values that are fixed.

A plan is made for given input shapes, so whatever follows from shapes alone (`x.size(0) // 2`) is
a constant of the plan. A value that follows from the *data* is not, whatever its type.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..formats import CHANNELS_LAST_OF, Format, format_of, to_format
from ..graph import Interpreter, puts_back, result_may_be_view, written_into
from ..graph.nodes.results import is_made, is_returned
from ..machine.host_memory import unread
from ..models.preserve import own
from ..models.trees import (
    can_be_remade,
    has_strides,
    storage_of,
    tensors_of,
    tuple_like,
    versions_of,
)
from ..operators.kinds import SHAPE_ATTRIBUTES, SHAPE_METHODS

_SMALL = 1 << 22
"""Bytes of a constant that is kept as it was made."""


@dataclass(frozen=True)
class Seen:
    """A tensor without its data."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    layout: Format | None

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        strided = " strided" if len(self.shape) == 3 and self.layout is None else ""
        return f"{sizes}:{str(self.dtype).removeprefix('torch.')}{strided}"


class Record:
    """The values of all nodes in one run of a graph on example inputs; tensors are `Seen`."""

    def __init__(self) -> None:
        self.values: dict[fx.Node, Any] = {}
        self.fixed: set[fx.Node] = set()
        self.strange: set[fx.Node] = set()
        """Images given in neither format, or of which views are returned, and their views. Also
        what is returned of an input that is written to, where strides decide whether it is a copy.

        A plan hands these on as they are.
        """
        self.beside: set[fx.Node] = set()
        """Views that are returned beside others of the same value: a write into one shows in all.

        In a plan torch makes them, of the one value that is returned.
        """
        self.strides: dict[fx.Node, tuple[int, ...]] = {}
        """Those of tensors that are dense, where no layout that plans know says them."""
        self.writes: list[tuple[fx.Node, fx.Node]] = []
        """Nodes that wrote into a value, with that value, where their name does not say so."""
        self.foreign: fx.Node | None = None
        """A node whose tensor is not just numbers at strides: it is sparse, nested, negated, ..."""
        self.constant: set[fx.Node] = set()
        """Tensors that follow from parameters and from shapes: they are made with the plan."""
        self.made: dict[fx.Node, Tensor] = {}
        """The small ones among them, and of parameters: kernels are timed on these very numbers.

        Where windows are masked with -100, scores become numbers that processors are slow with.
        """
        self.whole: set[fx.Node] = set()
        """Constants of whole numbers, or of truth, that are made floats with the plan."""
        self.tokens: set[fx.Node] = set()
        """Tensors whose channels are their last dimension, though they may have four."""

    def tensor(self, node: fx.Node) -> Seen | None:
        value = self.values.get(node)
        return value if isinstance(value, Seen) else None

    def lies_by_pixels(self, node: fx.Node) -> bool:
        """Whether `node` returns images or volumes, and no tokens."""
        return self.image(node) is not None and node not in self.tokens

    def is_given(self, node: fx.Node) -> bool:
        """Whether it is a parameter, or follows from parameters and shapes."""
        return node.op == "get_attr" or node in self.constant

    def known(self, value: Any) -> Any:
        """What a node returns that returns the same in each call; anything else as it is."""
        fixed = isinstance(value, fx.Node) and value in self.fixed
        return self.values[value] if fixed else value

    def read_by(self, node: fx.Node) -> tuple[fx.Node, ...]:
        """The values that `node` reads, but for those that are fixed."""
        return tuple(one for one in node.all_input_nodes if one not in self.fixed)

    def image(self, node: fx.Node) -> Seen | None:
        """The tensor that `node` returned, if it is an image or a volume: these have formats."""
        seen = self.tensor(node)
        return seen if seen and len(seen.shape) in CHANNELS_LAST_OF else None


def record(graph: fx.GraphModule, inputs: Sequence[Any]) -> Record:
    """Run `graph` on `inputs` without gradients and return what its nodes were seen to return."""
    result = Record()
    with torch.no_grad():
        _Recorder(graph, result).run(*_own(inputs))
    # Parameters that nodes read themselves; those of modules went back after each module.
    unread(graph.parameters())
    return result


def _own(inputs: Sequence[Any]) -> list[Any]:
    """`inputs` in memory of their own, with their strides, and shared where theirs is.

    A part that cannot be looked into may write into what it is given, and that is known only behind
    the run.
    """
    memo: dict[int, Any] = {}
    return [own(x, memo) if isinstance(x, Tensor) else x for x in inputs]


def layout_of(tensor: Tensor) -> Format | None:
    """CHANNELS_LAST or CONTIGUOUS, by the densest dimension; None where both or neither fits.

    In plans CHANNELS_LAST is the one word for it, of images and of volumes.

    Rows in batches have no other layout: for them, CONTIGUOUS or None.

    A channel slice of a channels-last tensor is densest in its channels, also one that leaves some
    out: it counts as channels last, as torch's own operators count it.
    """
    if tensor.ndim == 3:
        return Format.CONTIGUOUS if tensor.is_contiguous() else None
    if tensor.ndim not in CHANNELS_LAST_OF:
        return None
    found = format_of(tensor)
    if found is Format.OTHER:
        sides = zip(tensor.stride(), tensor.shape, strict=True)
        densest = min((step for step, size in sides if step and size > 1), default=1)
        last = 0 < tensor.stride(1) <= densest
        return Format.CHANNELS_LAST if last else Format.CONTIGUOUS
    if found is Format.AMBIGUOUS:
        return None
    return Format.CHANNELS_LAST if found.is_last else found


def laid_out(tensor: Tensor, layout: Format) -> Tensor:
    """An image or a volume in a layout that plans know.

    >>> laid_out(torch.empty(1, 8, 2, 4, 4), Format.CHANNELS_LAST).stride()
    (256, 1, 128, 32, 8)
    """
    return to_format(tensor, CHANNELS_LAST_OF[tensor.ndim] if layout.is_last else layout)


class _Recorder(Interpreter):
    def __init__(self, graph: fx.GraphModule, result: Record) -> None:
        super().__init__(graph)
        self.result = result
        self._strange: set[int] = set()
        self._inputs: dict[int, list[fx.Node]] = {}
        """The nodes that lie in the memory of each input."""
        self._returned: dict[int, set[fx.Node]] = defaultdict(set)
        """The nodes that are returned, by the memory they lie in."""

    def run_node(self, n: fx.Node) -> Any:
        given = {node: versions_of(self.env[node]) for node in n.all_input_nodes}
        value = super().run_node(n)
        if n.op == "call_module":
            unread(self.module.get_submodule(str(n.target)).parameters())
        if written_into(n) is None:
            changed = [node for node in given if versions_of(self.env[node]) != given[node]]
            self.result.writes += [(n, node) for node in changed]
        self.result.values[n] = seen_in(value)
        if any(map(_is_foreign, tensors_of(value))):
            self.result.foreign = n
        if isinstance(value, Tensor) and has_strides(value):
            self._note_strange(n, value)
            if _is_unsaid(value):
                self.result.strides[n] = value.stride()
        # What holds others is no view of them.
        if is_returned(n) and not is_made(n):
            for tensor in tensors_of(value):
                self._returned[storage_of(tensor)].add(n)
        if n.op == "output":
            self._note_returned()
        if _is_fixed(n, value, self.result.fixed):
            self.result.fixed.add(n)
        elif isinstance(value, Tensor) and self._is_made(n) and _is_small(value):
            self.result.made[n] = value
        return value

    def _is_made(self, n: fx.Node) -> bool:
        """Whether parameters and sizes alone decide what a node returns."""
        read = self.result.read_by(n)
        return n.op != "placeholder" and all(one in self.result.made for one in read)

    def _note_strange(self, n: fx.Node, value: Tensor) -> None:
        memory = storage_of(value)
        if n.op == "placeholder":
            self._inputs[memory] = []
            if value.ndim == 4 and format_of(value) is Format.OTHER:
                self._strange.add(memory)
        if memory in self._inputs:
            self._inputs[memory].append(n)
        if memory in self._strange and value.ndim == 4:
            self.result.strange.add(n)

    def _note_returned(self) -> None:
        """Returned views of an input share its memory, and those of one value its, as in eager."""
        for memory, nodes in self._returned.items():
            self.result.strange.update(self._inputs.get(memory, ()))
            for node in nodes:
                self._note_copy(node)
            if len(nodes) > 1:
                for node in nodes:
                    self._note_views(node)

    def _note_copy(self, node: fx.Node) -> None:
        """Note a copy of an input that is returned, which other strides would make a view.

        Of an input that is written to in the end: the view changes with it.
        """
        made = []
        while result_may_be_view(node) and len(read := self.result.read_by(node)) == 1:
            made.append(node)
            node = read[0]
        if made and any(puts_back(user) and user.args[0] is node for user in node.users):
            self.result.strange.update((node, *made))

    def _note_views(self, node: fx.Node) -> None:
        """Note a returned view, and those that it is made of."""
        while result_may_be_view(node) and node not in self.result.beside:
            self.result.beside.add(node)
            node = next(iter(node.all_input_nodes), node)


def _is_unsaid(value: Tensor) -> bool:
    """Whether a tensor is dense, but not contiguous or channels last alone.

    Of one channel or one pixel it is both: torch's next operator goes by the strides of such sides.
    """
    found = format_of(value)
    if found is not Format.AMBIGUOUS and (found.is_last or value.is_contiguous()):
        return False
    # A tensor like it has its strides if these leave no gaps.
    return torch.empty_like(value, device="meta").stride() == value.stride()


def _is_small(value: Tensor) -> bool:
    return has_strides(value) and value.nbytes <= _SMALL


def _is_foreign(value: Tensor) -> bool:
    return not has_strides(value) or value.is_quantized or value.is_neg()


def seen_in(value: Any) -> Any:
    if isinstance(value, Tensor) and not value.is_nested:
        return Seen(tuple(value.shape), value.dtype, str(value.device), layout_of(value))
    if type(value) is list:
        value = tuple(value)
    return tuple_like(value, map(seen_in, value)) if can_be_remade(value) else value


_PURE: set[Any] = {
    *(f for module in (operator, math) for f in vars(module).values() if callable(f)),
    *(abs, bool, divmod, float, int, isinstance, len, list, max, min, pow, round),
    *(slice, sum, tuple, torch.Size, torch.finfo, torch.iinfo),
}


def _is_fixed(node: fx.Node, value: Any, fixed: set[fx.Node]) -> bool:
    if not _is_plain(value):
        return False
    if node.op == "placeholder":
        return True
    if node.op == "call_method" and node.target in SHAPE_METHODS:
        return True
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in SHAPE_ATTRIBUTES or node.args[0] in fixed
    if node.op == "call_function" and node.target is torch.numel:
        return True
    inputs = node.all_input_nodes
    return bool(inputs) and node.target in _PURE and all(other in fixed for other in inputs)


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple, torch.Size):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, _PLAIN)


_PLAIN = (
    *(int, float, bool, str, slice),
    *(torch.dtype, torch.device, torch.layout, torch.finfo, torch.iinfo),
)
