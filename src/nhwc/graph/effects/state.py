"""Notice and undo changes that a `forward` makes to its module while it is traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, jit, nn

from ...models.contents import (
    Contents,
    home_of,
    is_as,
    is_iterator,
    itself,
    put_back,
    with_contents,
)
from ...models.preserve import drawn_so_far, place_of
from ...models.trees import versions_of
from ..nodes.edit import attribute
from ..nodes.names import CONSTANT, FOLLOWING
from ..nodes.shapes import node_of
from .kept import Kept


class Changed(fx.proxy.TraceError):
    """A forward changed these attributes of these modules."""

    def __init__(self, reason: str, attributes: list[tuple[nn.Module, str]]) -> None:
        super().__init__(reason)
        self.attributes = attributes


class State:
    """The state that a forward pass may change: a graph would lose such a change silently."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        with torch._C.DisableTorchFunction():  # No mode has to follow this.
            self._note(module)

    def _note(self, module: nn.Module) -> None:
        # Reading a TorchScript module's attributes changes its dictionary.
        parts = [part for part in module.modules() if not isinstance(part, jit.ScriptModule)]
        homes = {home_of(part) for part in parts}
        self.attributes = [(part, _copied(part, homes)) for part in parts]
        self.slots = [(slot, {**slot}) for part in parts for slot in _slots(part)]
        tensors = _tensors(module)
        self.versions = versions_of(tensors)
        # `p.data = x` gives a tensor other memory.
        self.memory = [(t, t.data) for t in tensors if type(t) in _USUAL]
        self.data = [
            _Held(b, b._version, b.clone()) for b in module.buffers() if not b.is_inference()
        ]
        self.drawn = drawn_so_far()

    def check(self, kept: Kept | None = None) -> None:
        """Raise what a graph would lose; what is `kept` and read by no call may be lost."""
        with torch._C.DisableTorchFunction():
            self._check(kept)

    def _check(self, kept: Kept | None) -> None:
        changed = [
            (part, key)
            for part, before in self.attributes
            for key in self._changed(part, before)
            if kept is None or not kept.is_left(part, key)
        ]
        if changed:
            part, key = changed[0]
            raise Changed(_changes(key, self.name_of(part)), changed)
        for slot, held in self.slots:
            if slot.keys() != held.keys() or any(slot[key] is not held[key] for key in held):
                raise fx.proxy.TraceError("its forward replaces a parameter or buffer")
        whole = self.versions == versions_of(_tensors(self.module))
        whole = whole and all(place_of(tensor) == place_of(data) for tensor, data in self.memory)
        if not whole or not all(map(_holds, self.data)):
            raise fx.proxy.TraceError("its forward writes into a parameter or buffer")
        if drawn_so_far() != self.drawn:
            raise fx.proxy.TraceError("its forward draws random numbers that a graph would freeze")

    def _changed(self, part: nn.Module, before: dict[str, Any]) -> list[str]:
        found = []
        for key, value in vars(part).items():
            # The tracer sets the constants; parameters and buffers are compared one by one.
            if key.startswith((CONSTANT, FOLLOWING)) or key in _SLOTS:
                continue
            old = before.get(key, self)
            if value is old:
                continue
            if isinstance(itself(old), Tensor) and _is_converted(value, itself(old)):
                vars(part)[key] = itself(old)
            elif not is_as(value, old):
                found.append(key)
        return [*found, *sorted({*before} - {*vars(part)})]

    def changed_in(self, module: nn.Module) -> str:
        """An attribute of `module` or its parts that is not what it was; '' if there is none."""
        parts = {*module.modules()}
        for part, before in self.attributes:
            if part not in parts:
                continue
            for key, value in vars(part).items():
                if key not in _SLOTS and not is_as(value, before.get(key, self)):
                    return key
        return ""

    def name_of(self, part: nn.Module) -> str:
        names: dict[nn.Module, str] = {module: name for name, module in self.module.named_modules()}
        return names.get(part, "")

    def put_back(self, attributes: Sequence[tuple[nn.Module, str]]) -> None:
        """Let these attributes be what they were."""
        for part, key in attributes:
            before = next(before for one, before in self.attributes if one is part)
            vars(part).pop(key, None)
            if key in before:
                vars(part)[key] = put_back(before[key])

    def restore(self) -> None:
        for part, before in self.attributes:
            now = vars(part)
            for key in [key for key in now if key not in before]:
                del now[key]
            for key, old in before.items():
                if key not in _SLOTS:
                    now[key] = put_back(old)
        # A buffer that the code assigned to holds a traced value now.
        for slot, held in self.slots:
            if slot.keys() != held.keys() or any(slot[key] is not held[key] for key in held):
                slot.clear()
                slot.update(held)
        for tensor, data in self.memory:
            if place_of(tensor) != place_of(data):
                tensor.data = data
        for one in self.data:
            if one.buffer._version != one.version or not _holds(one):
                one.buffer.copy_(one.values)


_SLOTS = ("_parameters", "_buffers")
"""Attributes whose tensors are compared one by one."""


def _slots(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return tuple(vars(module)[name] for name in _SLOTS)


_USUAL = (Tensor, nn.Parameter)
"""Tensors with memory of their own, unlike those of other classes."""


def _copied(module: nn.Module, homes: set[str]) -> dict[str, Any]:
    """The attributes of a module, with the contents of those among them that hold others."""
    kept = {}
    for key, value in vars(module).items():
        told = None if key in _SLOTS else with_contents(value, homes=homes)
        # A module that keeps an iterator is not traced.
        kept[key] = value if isinstance(told, Contents) and is_iterator(value) else told
    return kept


def _is_converted(value: Any, old: Tensor) -> bool:
    """Whether it is what `self.mean = self.mean.type_as(x)` leaves: the same, in another type.

    Models that restore images begin so. The graph converts the numbers that the model was made of.
    """
    node = node_of(value)
    if node is None or node.op != "call_method" or node.target != "type_as":
        return False
    source: Any = node.args[0]
    if not isinstance(source, fx.Node) or source.op != "get_attr":
        return False
    return attribute(value.tracer.root, str(source.target)) is old


def _changes(key: str, part: str) -> str:
    if key.endswith("_hooks"):
        return f"its forward sets hooks on {part or 'itself'} while it runs"
    if key == "_modules":
        return f"its forward replaces parts of {part or 'itself'}"
    return f"its forward changes {part or 'self'}.{key}"


class _Held(NamedTuple):
    """A buffer, and what it held."""

    buffer: Tensor
    version: int
    values: Tensor


def _holds(held: _Held) -> bool:
    """Whether a buffer has its values still: a write through `data` raises no version."""
    now, values = held.buffer, held.values
    plain = type(now) is Tensor and now.layout is torch.strided and not now.is_meta
    if not plain or torch.equal(now, values):
        return True
    return now.shape == values.shape and bool(((now == values) | (now != now)).all())


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
