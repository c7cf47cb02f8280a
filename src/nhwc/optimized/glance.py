"""Look at all that a stamp compares by the bare words of memory it lies in, in one call.

A comparison through Python and torch touches a dozen objects for each weight, each found through
the one before it, and hardly any still in the caches after a call of the model: half a millisecond
for a hundred weights. But the words in which such objects keep their state stay where they are.
Read side by side, from a list of addresses, they take a fifth of that.

    dict ------- a version, which Python raises at each write to it
    Tensor ----- where torch's own object is
        TensorImpl ----- storage, sizes, strides, type, and where the counter of writes is
            storage ----- where the numbers are
                numbers ----- a sample
            counter ----- how many writes torch has seen

Where in an object a word lies is nobody's promise. So it is looked up on objects made for that, and
then proven: each kind of change must be seen on them, or else this process takes no glances.

A glance that sees none has seen all. One that sees a change proves nothing, as some mean nothing
(a new attribute of a module is a write to a dict): who looks then compares the facts themselves.
"""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import kernels

_WORD = 8
_INLINE = 5
"""Sizes and strides of more dimensions lie apart from the tensor."""
_FRONT = 3
"""In how many words in front of a module Python keeps what is not its own."""
_LONGEST = 24
"""In how many words of torch's object all that is looked up must lie."""


class Unsure(Exception):
    """The state of these objects cannot be told from words of memory."""


class Glance:
    """What some dicts, tensors, samples of these tensors' memory, and modules were when this was
    made: of modules their class and their `__dict__`, by identity.

    >>> weight = torch.zeros(64)
    >>> names = {"weight": weight}
    >>> glance = Glance([names], [weight], [weight.numpy().data.cast("B")])
    >>> glance.sees_no_change()
    True
    >>> names["weight"] = torch.zeros(64)
    >>> glance.sees_no_change()
    False

    It keeps the objects alive, and the memory of the tensors if they are given other memory.
    """

    def __init__(
        self,
        dicts: Sequence[Mapping[str, Any]],
        tensors: Sequence[Tensor],
        samples: Iterable[memoryview],
        modules: Sequence[nn.Module] = (),
    ) -> None:
        if not _is_proven():
            raise Unsure
        self._look(_layout(), dicts, tensors, samples, modules)

    @classmethod
    def _by(cls, layout: _Layout, *objects: Any) -> Glance:
        """One that takes a layout for true."""
        glance = cls.__new__(cls)
        glance._look(layout, *objects)
        return glance

    def _look(
        self,
        layout: _Layout,
        dicts: Sequence[Mapping[str, Any]],
        tensors: Sequence[Tensor],
        samples: Iterable[memoryview],
        modules: Sequence[nn.Module],
    ) -> None:
        from ..kernels.tape.words import Words

        self._kept = (dicts, tensors, [tensor.detach() for tensor in tensors], modules)
        held = [id(one) + layout.version * _WORD for one in dicts]
        held += [id(one) + layout.kind * _WORD for one in modules]
        held += [id(one) + layout.attributes * _WORD for one in modules]
        held += [id(tensor) + layout.held * _WORD for tensor in tensors]
        # These addresses are true while the ones before hold what they did.
        inside: list[int] = []
        for tensor, memory in zip(tensors, self._kept[2], strict=True):
            inside += layout.words(tensor, memory)
        # And so are these: a storage that is kept may still let go of its numbers, as when it is
        # resized, or moved to where other processes see it.
        numbers: list[int] = []
        self._ends: list[memoryview] = []
        for sample in samples:
            begin, end = _whole_words(sample)
            numbers += range(begin, end, _WORD)
            self._ends += _outside(sample, begin, end)
        self._bytes = b"".join(self._ends)
        self._words = Words([held, inside, numbers])

    def sees_no_change(self) -> bool:
        return self._words.are_as_they_were() and b"".join(self._ends) == self._bytes


class _Layout(NamedTuple):
    """In which words of Python's and torch's objects lies what a stamp compares."""

    version: int
    """Of a dict."""
    kind: int
    """Of an object: its class."""
    attributes: int
    """Of a module: its `__dict__`, in front of what Python calls its address."""
    held: int
    """Of a tensor in Python: the address of torch's own."""
    begin: int
    """Of torch's own: the address of the storage, and the first to compare."""
    end: int
    counter: int
    """Of torch's own: the address of the counter."""
    writes: int
    """Of the counter."""
    place: int
    """Of a storage: the address of its numbers."""

    def words(self, tensor: Tensor, memory: Tensor) -> Iterator[int]:
        """Addresses that `memory`, another tensor of the same numbers, keeps alive with it."""
        own, storage = tensor._cdata, tensor.untyped_storage()._cdata
        if (
            tensor.ndim > _INLINE
            or memory.untyped_storage()._cdata != storage
            or _at(id(tensor), self.held) != own
            or _at(own, self.begin) != storage
            or _at(storage, self.place) != tensor.untyped_storage().data_ptr()
        ):
            raise Unsure
        yield from range(own + self.begin * _WORD, own + self.end * _WORD, _WORD)
        yield storage + self.place * _WORD
        if not tensor.is_inference():
            counter = _at(own, self.counter)
            if counter != _at(memory._cdata, self.counter):
                raise Unsure
            yield counter + self.writes * _WORD


def _at(address: int, word: int) -> int:
    return ctypes.c_uint64.from_address(address + word * _WORD).value


def _whole_words(sample: memoryview) -> tuple[int, int]:
    begin = ctypes.addressof(ctypes.c_char.from_buffer(sample))
    first, end = -(-begin // _WORD) * _WORD, (begin + len(sample)) // _WORD * _WORD
    return first, max(first, end)


def _outside(sample: memoryview, begin: int, end: int) -> list[memoryview]:
    """What of a sample lies in no whole word."""
    first = ctypes.addressof(ctypes.c_char.from_buffer(sample))
    parts = sample[: begin - first], sample[end - first :]
    return [part for part in parts if len(part)]


@cache
def _layout() -> _Layout:
    """Find each word by what it must hold in tensors made for that.

    A tensor shares the counter with what `detach` returns, and with no other. Its type is in the
    words that are those of a tensor of another type once it is given that.
    """
    with torch.inference_mode(False):
        sizes, strides = (2, 3, 5, 7, 11), (4001, 1009, 149, 13, 1)
        one = _zeros(9000).as_strided(sizes, strides, 23)
        same, other, typed = one.detach(), _zeros(1), one.view(torch.int32)
    words, shared, foreign = map(_words_in, (one, same, other))
    storage = one.untyped_storage()
    begin = _index(words, [storage._cdata])
    numbers = ([*sizes], [*strides], [one.numel()], [int(one.storage_offset())])
    ends = [_index(words, wanted) + len(wanted) for wanted in numbers]
    one.data = typed
    retyped = zip(_words_in(one), _words_in(typed), words, shared, strict=True)
    types = [i for i, (now, new, was, old) in enumerate(retyped) if now == new != was == old]
    counters = [
        i
        for i in range(begin + 1, max(ends))
        if words[i] == shared[i] != foreign[i] and words[i] % _WORD == 0 and words[i] > 1 << 16
    ]
    if len(counters) != 1 or not begin < counters[0] < min(ends) or not types:
        raise Unsure
    names = {"first": 1, "last": 2}
    module = nn.Module()
    attributes = vars(module)
    front = [_at(id(module), i) for i in range(-_FRONT, 0)]
    return _Layout(
        version=_changed(id(names), dict.__basicsize__ // _WORD, lambda: names.update(first=3)),
        kind=_index([_at(id(module), i) for i in range(2)], [id(nn.Module)]),
        attributes=_index(front, [id(attributes)]) - _FRONT,
        held=_index([_at(id(one), i) for i in range(Tensor.__basicsize__ // _WORD)], [one._cdata]),
        begin=begin,
        end=max(*ends, types[-1] + 1),
        counter=counters[0],
        writes=_changed(words[counters[0]], 3, same.zero_),
        place=_index([_at(storage._cdata, i) for i in range(6)], [storage.data_ptr()]),
    )


def _words_in(tensor: Tensor) -> list[int]:
    return [_at(tensor._cdata, i) for i in range(_LONGEST)]


def _index(words: Sequence[int], wanted: Sequence[int]) -> int:
    for i in range(len(words)):
        if list(words[i : i + len(wanted)]) == list(wanted):
            return i
    raise Unsure


def _changed(address: int, count: int, change: Callable[[], object]) -> int:
    """The one of `count` words which `change` changes."""
    before = [_at(address, i) for i in range(count)]
    change()
    changed = [i for i in range(count) if _at(address, i) != before[i]]
    if len(changed) != 1:
        raise Unsure
    return changed[0]


def _is_proven() -> bool:
    try:
        return kernels.available() and _proof()
    except Unsure:
        # Not for good: torch may be in a mode that makes other tensors than usual.
        return False


@cache
def _proof() -> bool:
    """Whether a glance sees each kind of change, and none where nothing changes."""
    with torch.inference_mode(False), torch.no_grad():
        return all(map(_is_seen, _CHANGES)) and not _is_seen(lambda module: None)


@cache
def sees_attributes() -> bool:
    """Whether a glance at `vars(module)` sees attributes come, change and go.

    Since Python 3.13 an object keeps them in itself, and its dict may not notice.
    """
    return _is_proven() and all(map(_is_seen, _CHANGES_OF_ATTRIBUTES))


def _is_seen(change: Callable[[nn.Module], object]) -> bool:
    # Layers of torch's would draw random numbers.
    module, weight, hooks = nn.Module(), _zeros(8, 8), OrderedDict[str, Any](first=1)
    module.weight, module.bias = weight, _zeros(8)
    vars(module).update(stride=1)
    module._parameters["hooks"] = hooks  # type: ignore[assignment]
    dicts = [vars(module), module._parameters, hooks]
    samples = [weight.detach().view(-1)[8:24].numpy().data.cast("B")]
    glance = Glance._by(_layout(), dicts, [weight], samples, [module])
    change(module)
    return not glance.sees_no_change()


def _zeros(*sizes: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*sizes, dtype=torch.float32, device="cpu"), requires_grad=False)


def _set_data(get: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], object]:
    return lambda module: setattr(module.weight, "data", get(module.weight.data))  # type: ignore[arg-type]


_CHANGES: tuple[Callable[[nn.Module], object], ...] = (
    lambda module: module._parameters.update(weight=_zeros(8, 8)),
    lambda module: module._parameters.pop("bias"),
    lambda module: module._parameters.update(weight=module._parameters.pop("weight")),
    lambda module: module._parameters["hooks"].update(second=2),  # type: ignore[union-attr]
    lambda module: module._parameters["hooks"].update(first=2),  # type: ignore[union-attr]
    lambda module: module._parameters["hooks"].clear(),  # type: ignore[union-attr]
    lambda module: setattr(module, "__class__", nn.Identity),
    lambda module: setattr(module, "__dict__", dict(vars(module))),
    lambda module: torch.utils.swap_tensors(module.weight, _zeros(8, 8)),
    lambda module: module.weight.zero_(),  # type: ignore[operator]
    lambda module: module.weight.data.fill_(3),  # type: ignore[operator,union-attr]
    _set_data(lambda weight: weight.clone()),
    _set_data(lambda weight: weight.t()),
    _set_data(lambda weight: weight.view(torch.int32)),
    _set_data(lambda weight: weight[:4]),
    _set_data(lambda weight: weight.view(-1).as_strided((7, 8), (8, 1), 1)),
)

_CHANGES_OF_ATTRIBUTES: tuple[Callable[[nn.Module], object], ...] = (
    lambda module: setattr(module, "forward", print),
    lambda module: setattr(module, "stride", print),
    lambda module: delattr(module, "stride"),
    lambda module: setattr(module, "_parameters", dict(module._parameters)),
    lambda module: vars(module).update(forward=print),
)
