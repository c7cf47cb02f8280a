"""Tell whether a model is still the one that kernels were packed from, before each planned call.

torch has many ways to give a model other weights, and reports few of them. So a stamp keeps the
facts that each of them must change, and compares them in an order in which each comparison may rely
on the one before it:

parts      modules, parameters and buffers in the slots of all modules, by identity; that there is
           no hook and no `forward` that was not there before, and no module of another class
versions   the counters that torch raises at each write that it sees
places     address, sizes and strides, which `p.data = ...` and `swap_tensors` change
numbers    a sample of the bytes, for writes that torch does not see: `p.data.copy_`, numpy's
           views, other processes. Up to 512 bytes are compared whole, more by the 64 in the
           middle: one line of the cache, and one page, as weights may lie in a file. Those on
           a GPU are not looked at, since that would wait until it has done all else

Each comparison is one call of a function in C on lists made beforehand. Still a hundred weights
take half a millisecond between the calls of a model, which leave little of them in the caches. So
once all was found as it was, later calls glance at the words that hold it (`glance`), and compare
again only if one of these changed.

All miss a write behind torch's back that spares the middle of a weight, and a change of a module's
other attributes (its stride, its eps) or of its class's.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Iterator, Sequence
from itertools import chain, compress, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module

from ..machine.host_memory import part_in_memory
from ..models.trees import has_strides
from .glance import Glance, Unsure, sees_attributes

_version = operator.attrgetter("_version")
_type = operator.attrgetter("dtype")
_dicts = operator.itemgetter(
    *("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
)

_WHOLE = 512
_LINE = 64


class Facts:
    """Versions, places and numbers of some tensors, of which it keeps none alive.

    >>> weight = torch.zeros(2)
    >>> facts = Facts([weight])
    >>> weight.data[0] = 3
    >>> facts.hold([weight]), Facts([weight]).hold([weight])
    (False, True)
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        # Tensors made under inference_mode have no versions.
        self._counted = [not t.is_inference() for t in tensors]
        self._placed = [has_place(t) for t in tensors]
        self._facts = self._of(tensors)
        self.samples = [
            sample
            for t in compress(tensors, self._placed)
            if t.device.type == "cpu"
            for sample in _samples(t)
        ]
        self._bytes = b"".join(self.samples)

    def hold(self, tensors: Sequence[Tensor]) -> bool:
        """Whether nothing was written to these, the tensors that the facts are of."""
        # The samples are views of bare memory: they are read where that is still the tensors'.
        try:
            return self._of(tensors) == self._facts and b"".join(self.samples) == self._bytes
        except RuntimeError:  # one of them has no place in memory any more
            return False

    def _of(self, tensors: Sequence[Tensor]) -> tuple[object, ...]:
        placed = [*compress(tensors, self._placed)]
        return (
            sum(map(_version, compress(tensors, self._counted))),
            list(map(_type, tensors)),
            list(map(Tensor.data_ptr, placed)),
            list(map(Tensor.size, placed)),
            list(map(Tensor.stride, placed)),
        )


class Stamp:
    """The state of a model when the stamp was made; `holder` are the slots that hold the model.

    >>> net = nn.Linear(2, 2)
    >>> stamp = Stamp(net)
    >>> net.weight.data[0, 0] = 3
    >>> stamp.holds(), stamp.has_parts(), Stamp(net).holds()
    (False, True, True)
    """

    def __init__(self, model: nn.Module, holder: dict[str, Any] | None = None) -> None:
        modules = list(model.modules())
        self._slots = [s for m in modules for s in (m._parameters, m._buffers, m._modules) if s]
        if holder is not None:
            self._slots.append(holder)
        self._held = [dict(slots) for slots in self._slots]
        # `==` asks for identity first. Where that fails, two tensors of one number may be equal.
        self._single = [
            (slots, name, value)
            for slots in self._slots
            for name, value in slots.items()
            if isinstance(value, Tensor) and value.numel() == 1
        ]
        self._set_calls(model, modules)
        self.tensors = [*model.parameters(), *model.buffers()]
        self._facts = Facts(self.tensors)
        # These keep the sampled memory alive if the tensors are given other memory.
        self._memory = [t.detach() for t in self.tensors if has_place(t) and t.device.type == "cpu"]
        self._glances = all(map(has_place, self.tensors))
        self._glance: Glance | None = None

    def _set_calls(self, model: nn.Module, modules: list[nn.Module]) -> None:
        """Note what is called: the kinds of all modules, their dicts, `forward`s and hooks."""
        self._attributes = list(map(vars, modules))
        self._dicts = self._identities()
        # torch.fx holds modules in plain nn.Modules, which nobody calls.
        called = [m for m in modules if m is model or type(m) is not nn.Module]
        self._called, self._kinds = called, list(map(type, called))
        self._own_attributes = list(map(vars, called))
        self._code = self._attributes[0].get("_code")
        hooks: list[Any] = [h for m in called for h in (m._forward_hooks, m._forward_pre_hooks)]
        everywhere = [every_module._global_forward_hooks, every_module._global_forward_pre_hooks]
        # No plan calls those of the whole, whenever they came, nor a `forward` set on it.
        of_all, within = hooks[:2], hooks[2:]
        self._unhooked = [*of_all, *(h for h in within if not h), *everywhere]
        self._hooked = [h for h in within if h]
        self._hooks = [h.copy() for h in self._hooked]
        self._own = [False, *self._with_forward()[1:]]

    def _identities(self) -> list[int]:
        """Of the dicts that hold the parts of all modules, and their hooks."""
        return list(map(id, chain.from_iterable(map(_dicts, self._attributes))))

    def _with_forward(self) -> list[bool]:
        return list(map(operator.contains, self._own_attributes, repeat("forward")))

    def holds(self) -> bool:
        """Whether all is as it was, as far as can be seen."""
        if self._glance is not None and self._glance.sees_no_change():
            return sees_attributes() or self._runs_the_same_code()
        self._glance = None
        # Only while all is in its place may a glance read it.
        if not self._compare():
            return False
        glance = self._look()
        # What another thread changed before the glance was made, it will never see.
        if glance is not None and not self._compare():
            return False
        self._glance = glance
        return True

    def _look(self) -> Glance | None:
        # A dispatch mode may make other tensors than a glance can be tried on.
        if not self._glances or torch._C._len_torch_dispatch_stack() > 0:
            return None
        dicts = [*self._slots, *self._unhooked, *self._hooked]
        if sees_attributes():
            dicts += self._attributes
        try:
            return Glance(dicts, self.tensors, self._facts.samples, self._called)
        except (Unsure, RuntimeError):
            self._glances = False
            return None

    def _compare(self) -> bool:
        try:
            return (
                self._is_called_alike()
                and self._slots == self._held
                and all(slots[name] is value for slots, name, value in self._single)
                and self._facts.hold(self.tensors)
            )
        except RuntimeError:
            # `==` of two tensors that are not the same one is a tensor, neither true nor false.
            return False

    def has_parts(self) -> bool:
        """Whether everything but the tensors is as it was: modules, names, hooks, `forward`."""
        return self._is_called_alike() and all(
            now.keys() == held.keys()
            and all(now[name] is one or _are_tensors(now[name], one) for name, one in held.items())
            for now, held in zip(self._slots, self._held, strict=True)
        )

    def in_slots(self) -> list[Tensor]:
        """The tensors that modules hold now."""
        return [t for slots in self._slots for t in slots.values() if isinstance(t, Tensor)]

    def has_tensors(self) -> bool:
        """Whether modules hold the same tensor objects, whatever numbers those have."""
        held = [t for slots in self._held for t in slots.values() if isinstance(t, Tensor)]
        now = self.in_slots()
        return len(now) == len(held) and all(map(operator.is_, now, held))

    def _is_called_alike(self) -> bool:
        return (
            not any(self._unhooked)
            and self._hooked == self._hooks
            and list(map(type, self._called)) == self._kinds
            and all(map(operator.is_, map(vars, self._called), self._own_attributes))
            and self._runs_the_same_code()
        )

    def _runs_the_same_code(self) -> bool:
        return (
            self._with_forward() == self._own
            and self._attributes[0].get("_code") == self._code
            and self._identities() == self._dicts
        )


def _are_tensors(*values: Any) -> bool:
    return all(isinstance(value, Tensor) for value in values)


def has_place(tensor: Tensor) -> bool:
    """Whether its numbers lie in memory, where its strides say."""
    ours = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    return ours and has_strides(tensor) and not tensor.is_meta


def _samples(tensor: Tensor) -> Iterator[memoryview]:
    """A live view of a tensor's memory, or of the middle of it where that is large."""
    if not tensor.numel():
        return
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin, size = tensor.data_ptr(), (last + 1) * tensor.itemsize
    if size > _WHOLE:
        begin, size = (begin + size // 2) // _LINE * _LINE, _LINE
        part_in_memory(tensor, begin, size)
    yield memoryview((ctypes.c_ubyte * size).from_address(begin)).cast("B")
