"""Which tensors that code makes of a model's buffers are cast with the model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only


class Following(TorchFunctionMode):
    """Sees what is computed of `buffers`: `self.mean.view(1, 3, 1, 1)`, say.

    torch.fx takes it for a constant that the code makes. The code would make it anew of a buffer
    that was cast. So what a graph reads is computed of another type, too, without numbers.
    """

    def __init__(self, buffers: Iterable[Tensor]) -> None:
        super().__init__()
        self._cast = {one: _cast(one) for one in buffers if one.is_floating_point()}
        self._same = {one: one for one in self._cast}
        self._calls: dict[Tensor, Callable[[], Tensor | None]] = {}
        """What may be cast, too: few of these are read, and to compute all took long."""

    def __contains__(self, tensor: Tensor) -> bool:
        return self._of_cast(tensor) is not None

    def itself(self, tensor: Tensor) -> Tensor:
        """The buffer that code has cast to the type that it has."""
        return self._same.get(tensor, tensor)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.__iter__ and args[0].ndim:
            # What is behind an iterator would be seen by nobody.
            return iter(self.__torch_function__(Tensor.unbind, types, args))
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        several = isinstance(result, tuple | list)
        parts = enumerate(result if several else [result])
        made = {place: one for place, one in parts if _is_of_floats(one)}
        if not made:
            return result
        given = [one for one in tree_leaves((args, kwargs)) if type(one) is Tensor]
        if not any(one in self._cast or one in self._calls for one in given):
            return result
        for place, one in made.items():
            of = place if several else None
            call = functools.partial(self._called, function, args, kwargs, of, one.dtype)
            if self._of_cast(one) is None:
                self._calls[one] = call
            elif not several and call() is None:
                # `x.float()` is x itself here, and would not be if that was cast.
                same: Tensor = one.view_as(one)
                if one in self._same:
                    self._same[same] = self._same[one]
                return same
        return result

    def _of_cast(self, tensor: Tensor) -> Tensor | None:
        """What `tensor` would be, had the buffers another type; None for what is not of them."""
        if tensor in self._calls:
            found = self._calls.pop(tensor)()
            if found is not None:
                self._cast[tensor] = found
        return self._cast.get(tensor)

    def _called(
        self, function: Any, args: Any, kwargs: Any, of: int | None, dtype: torch.dtype
    ) -> Tensor | None:
        """What a function would return of buffers that were cast, or one of several; None if in
        the same type."""
        with torch._C.DisableTorchFunction():
            args, kwargs = tree_map_only(Tensor, self._without_numbers, (args, kwargs))
            try:
                result = function(*args, **kwargs)
                found: Tensor = result if of is None else result[of]
            except Exception:
                # It asks for numbers, or takes no other type.
                return None
        return None if found.dtype == dtype else found

    def _without_numbers(self, tensor: Tensor) -> Tensor:
        found = self._of_cast(tensor)
        return tensor.to("meta") if found is None else found


def _is_of_floats(value: Any) -> bool:
    return type(value) is Tensor and value.is_floating_point()


def _cast(tensor: Tensor) -> Tensor:
    other = torch.float32 if tensor.dtype == torch.float64 else torch.float64
    return torch.empty_like(tensor, dtype=other, device="meta")
