"""Tell what a forward keeps for later from what it remembers from one call to the next.

    self.attention = weights                    kept: a picture of it may be drawn
    self.heads[0] = self.head(x)                kept: training would read it

    self.count += 1                             remembered
    y = x - self.last; self.last = x            remembered

What is written before anything reads it says nothing to the next call, so a graph may leave it out.
Of a list or a dict the items are told apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from torch import nn

_NOTHING = object()


class Kept:
    """Watches attributes of modules while code runs: which are read before they are written?

    >>> class Net(nn.Module):
    ...     last, sum = None, 0
    ...     def forward(self, x):
    ...         self.last, self.sum = x, self.sum + x
    >>> net = Net()
    >>> with Kept([(net, "last"), (net, "sum")]) as kept:
    ...     net(1)
    >>> kept.is_left(net, "last"), kept.is_left(net, "sum")
    (True, False)
    """

    def __init__(self, attributes: Sequence[tuple[nn.Module, str]]) -> None:
        self.attributes = attributes
        self._containers: dict[int, Any] = {}
        self._read: set[tuple[int, str]] = set()
        self._hidden: list[tuple[type, str, Any]] = []

    def __enter__(self) -> Kept:
        for part, name in self.attributes:
            value = vars(part).get(name)
            kind = _WATCHED.get(type(value))
            if kind:
                # Parts may share a list.
                vars(part)[name] = self._containers.setdefault(id(value), kind(value))
        for kind, name in dict.fromkeys((type(part), name) for part, name in self.attributes):
            self._hidden.append((kind, name, vars(kind).get(name, _NOTHING)))
            setattr(kind, name, _Watch(name, getattr(kind, name, _NOTHING), self._read))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None
    ) -> None:
        for owner, name, before in reversed(self._hidden):
            if before is _NOTHING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._hidden.clear()

    def is_left(self, part: nn.Module, name: str) -> bool:
        """Whether this attribute was watched, and nothing read it before it was written."""
        watched = any(one is part and key == name for one, key in self.attributes)
        value = vars(part).get(name)
        if isinstance(value, _Watched):
            return watched and not value.is_read
        return watched and (id(part), name) not in self._read


class _Watch:
    """Stands in a class for an attribute of its instances, and notes who reads it too early."""

    def __init__(self, name: str, default: Any, read: set[tuple[int, str]]) -> None:
        self.name, self.default, self.read = name, default, read
        self.written: set[int] = set()

    def __get__(self, part: Any, owner: type | None = None) -> Any:
        value = self.default if part is None else vars(part).get(self.name, self.default)
        if part is not None and id(part) not in self.written:
            self.read.add((id(part), self.name))
        if value is _NOTHING:
            raise AttributeError(f"it has no attribute {self.name!r}")
        return value

    def __set__(self, part: Any, value: Any) -> None:
        self.written.add(id(part))
        vars(part)[self.name] = value

    def __delete__(self, part: Any) -> None:
        self.read.add((id(part), self.name))
        del vars(part)[self.name]


class _Watched:
    """A container that `is_read` if code does more with it than to put items there and read these.

    Each of its other methods tells of what was there before.
    """

    is_read = False

    def __init__(self, items: Any) -> None:
        super().__init__(items)  # type: ignore[call-arg]
        self._written: list[Any] = []

    def __setitem__(self, key: Any, value: Any) -> None:
        self.is_read |= isinstance(key, slice)
        self._written.append(key)
        super().__setitem__(key, value)  # type: ignore[misc]

    def __getitem__(self, key: Any) -> Any:
        self.is_read |= isinstance(key, slice) or key not in self._written
        return super().__getitem__(key)  # type: ignore[misc]

    def __init_subclass__(cls) -> None:
        """Let the methods that it has from Python's own container note that it is read."""
        own = cls.__mro__[2]
        for name, method in vars(own).items():
            plain = name in vars(object) and name not in ("__eq__", "__ne__", "__repr__")
            if callable(method) and not plain and name not in {*vars(_Watched), "append"}:
                setattr(cls, name, _noting(method))


def _noting(method: Any) -> Any:
    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.is_read = True
        return method(self, *args, **kwargs)

    return noted


class _List(_Watched, list[Any]):
    pass


class _Dict(_Watched, dict[Any, Any]):
    pass


_WATCHED: dict[type, Any] = {list: _List, dict: _Dict}
