"""Whether words of memory are as they were, wherever they lie: one call for thousands of them.

They lie far apart, and little of them is in the caches between two calls of a model. So no read
waits for another, and each is asked for long before: the processor has a dozen under way at a time.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

from ..language.compiler import Args, Kernel
from ..language.values import Value
from ..language.vectors import Emitter

_AHEAD = 48


class Words:
    """The 64-bit words at some addresses, and what they were when this was made.

    >>> numbers = array("q", [1, 2, 3])
    >>> begin, _ = numbers.buffer_info()
    >>> words = Words([range(begin, begin + 24, 8)])
    >>> words.are_as_they_were()
    True
    >>> numbers[2] = 4
    >>> words.are_as_they_were()
    False

    `groups` are read one after the other: later addresses may be true only while the words before
    them are as they were. The lock of Python is held meanwhile, so no other thread frees any.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._groups = []
        for addresses in groups:
            at, were = array("q", addresses), array("q", map(_word, addresses))
            places = (at.buffer_info()[0], were.buffer_info()[0], len(at))
            self._groups.append((at, were, array("q", [*places, 0])))
        self._calls = [block.buffer_info()[0] for *_, block in self._groups]
        kind = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_int64] * 3)
        self._compare = kind(COMPARE.address)

    def are_as_they_were(self) -> bool:
        for call, (_, _, block) in zip(self._calls, self._groups, strict=True):
            self._compare(call, 0, 1, 0)
            if block[3]:
                return False
        return True


def _word(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


def _emit_compare(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    addresses, numbers = a.addresses.integers(), a.numbers.integers()
    changed = e.variable(0)
    with e.range(0, a.count) as i:
        e.prefetch(e.read(addresses + e.min(i + _AHEAD, a.count - 1)).integers())
        differs = e.read(e.read(addresses + i).integers()) != e.read(numbers + i)
        changed.value = changed.value | e.select(differs, e.i64(1), e.i64(0))
    e.write(changed.value, a.words + 3)


COMPARE = Kernel("compare_words", ("addresses", "numbers", "count", "changed"), _emit_compare)
