"""Replace functions that torch has once for all threads, in the eyes of one thread."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...models.preserve import turn


@contextlib.contextmanager
def replaced(*places: tuple[Any, str, Callable[..., Any]]) -> Iterator[None]:
    """Let this thread call other functions in these places: an owner, a name and the function.

    The other threads call what was there before, and wait for their turn to replace something.

    >>> from torch import nn
    >>> with replaced((nn.ReLU, "forward", lambda layer, x: "seen")):
    ...     nn.ReLU()(1)
    'seen'
    """
    here: int | None = threading.get_ident()

    def chosen(function: Callable[..., Any], before: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(before)
        def call(*args: Any, **kwargs: Any) -> Any:
            # Dynamo, which may compile in another thread, cannot look at threads.
            mine = not torch.compiler.is_dynamo_compiling() and threading.get_ident() == here
            return (function if mine else before)(*args, **kwargs)

        # torch.fx replaces nothing that has this mark: its own functions are for all threads.
        call.__fx_already_patched = True  # type: ignore[attr-defined]
        return call

    with turn:
        held = [(owner, name, vars(owner).get(name, _INHERITED)) for owner, name, _ in places]
        try:
            for owner, name, function in places:
                setattr(owner, name, chosen(function, getattr(owner, name)))
            yield
        finally:
            here = None
            for owner, name, before in held:
                if before is _INHERITED:
                    delattr(owner, name)
                else:
                    setattr(owner, name, before)


_INHERITED = object()
