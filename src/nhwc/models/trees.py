"""Nested lists, tuples, dicts and dataclasses of tensors, and lists of names."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

CONTAINERS = (list, dict, set, deque)


def has_strides(tensor: Tensor) -> bool:
    """Whether strides say where its numbers lie: not of a sparse, a nested or oneDNN's own tensor.

    >>> has_strides(torch.ones(2)), has_strides(torch.ones(2).to_sparse())
    (True, False)
    """
    return tensor.layout is torch.strided and not tensor.is_nested


def storage_of(tensor: Tensor) -> int:
    """What is the same for tensors that share memory, and for those that vmap makes of them."""
    tensor = _unwrapped(tensor)
    storage = _storage_in(tensor)
    return id(tensor) if storage is None else int(storage._cdata)


def weakly_held(tensor: Tensor) -> StorageWeakRef | None:
    """While this lives, `storage_of` gives the same to no other, though its memory may be freed."""
    storage = _storage_in(_unwrapped(tensor))
    return None if storage is None else StorageWeakRef(storage)


def _unwrapped(tensor: Tensor) -> Tensor:
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def _storage_in(tensor: Tensor) -> torch.UntypedStorage | None:
    if not has_strides(tensor):
        return None
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None


def tensors_of(tree: object) -> list[Tensor]:
    """Every tensor in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def each_changed(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`tree` with what `change` makes of each tensor; those that share memory go on sharing it.

    >>> x = torch.ones(4)
    >>> whole, part = each_changed((x, x[2:]), Tensor.clone)
    >>> whole.zero_(), part
    (tensor([0., 0., 0., 0.]), tensor([0., 0.]))
    """
    alike: dict[object, list[Tensor]] = {}
    for tensor in {id(tensor): tensor for tensor in every_tensor_of(tree)}.values():
        alike.setdefault(_memory_of(tensor), []).append(tensor)
    new: dict[int, Tensor] = {}
    for tensors in alike.values():
        if len(tensors) == 1:
            new[id(tensors[0])] = change(tensors[0])
            continue
        whole = change(_whole(tensors[0]))
        for one in tensors:
            new[id(one)] = whole.as_strided(one.shape, one.stride(), one.storage_offset())
    return remade(tree, lambda leaf: new[id(leaf)] if isinstance(leaf, Tensor) else leaf)


def remade(tree: Any, change: Callable[[Any], Any]) -> Any:
    """`tree` with what `change` makes of each leaf; torch alone takes an object for a leaf.

    >>> batch = SimpleNamespace(image=2, sizes=[3, 4])
    >>> remade(batch, lambda leaf: -leaf), batch
    (namespace(image=-2, sizes=[-3, -4]), namespace(image=2, sizes=[3, 4]))
    """
    return tree_map(lambda leaf: _remade(leaf, change), tree)


def _remade(leaf: Any, change: Callable[[Any], Any]) -> Any:
    items: Iterable[tuple[Any, Any]]
    if isinstance(leaf, MutableMapping):
        items = leaf.items()
    elif isinstance(leaf, (list, deque)):
        items = enumerate(leaf)
    elif (attributes := _attributes(leaf)) is not None:
        new = copy.copy(leaf)
        for name, item in attributes.items():
            # A frozen dataclass refuses its own `setattr`.
            object.__setattr__(new, name, remade(item, change))
        return new
    else:
        return change(leaf)
    new = copy.copy(leaf)
    for key, item in items:
        new[key] = remade(item, change)
    return new


def _memory_of(tensor: Tensor) -> object:
    """The same for tensors that are views of one plain tensor of their type; its own for others."""
    plain = type(tensor) in (Tensor, nn.Parameter) and has_strides(tensor)
    if not plain or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return id(tensor)
    return tensor.untyped_storage()._cdata, tensor.dtype


def _whole(tensor: Tensor) -> Tensor:
    """All that lies in the memory of `tensor`, one number behind the other."""
    count = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.as_strided((count,), (1,), 0)


def flatten(value: Any, path: str = "output") -> Iterator[tuple[str, Any]]:
    """Every leaf of nested lists, tuples, mappings, dataclasses and namespaces, with its path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from flatten(item, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple, deque)):
        for index, item in enumerate(value):
            yield from flatten(item, f"{path}[{index}]")
    elif (attributes := _attributes(value)) is not None:
        for name, item in attributes.items():
            yield from flatten(item, f"{path}.{name}")
    else:
        yield path, value


def _attributes(value: Any) -> dict[str, Any] | None:
    """What a namespace or a dataclass holds, by name; None of anything else."""
    if isinstance(value, SimpleNamespace):
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def every_tensor_of(value: object) -> list[Tensor]:
    """Every tensor in what a model is given or returns, also in mappings and dataclasses."""
    return [tensor for _, leaf in flatten(value) for tensor in tensors_of(leaf)]


def tuple_like(like: tuple[Any, ...], items: Iterable[Any]) -> Any:
    """A tuple of `items` of the same kind as `like`: a named one, one such as `x.max(1)` returns.

    >>> tuple_like(torch.ones(2).max(0), (1, 2)).indices
    2
    """
    kind: Any = type(like)
    return getattr(kind, "_make", kind)(items)


def is_named_by_torch(value: object) -> bool:
    """Whether it is a tuple such as `x.max(1)` returns, which code cannot make of its parts."""
    return isinstance(value, tuple) and type(value).__module__ == torch.return_types.__name__


def can_be_remade(value: object) -> bool:
    """Whether it is a tuple of a kind that `tuple_like` makes: a class of its own may ask for more.

    >>> class Pair(tuple):
    ...     def __new__(cls, first, second):
    ...         return super().__new__(cls, (first, second))
    >>> can_be_remade((1, 2)), can_be_remade(Pair(1, 2))
    (True, False)
    """
    usual = type(value) in (tuple, torch.Size) or is_named_by_torch(value)
    return usual or (isinstance(value, tuple) and hasattr(value, "_fields"))


def versions_of(tree: object) -> list[int]:
    """Torch's counter of writes to each tensor in `tree`; inference tensors have none."""
    return [tensor._version for tensor in tensors_of(tree) if not tensor.is_inference()]


def some(names: list[str]) -> str:
    """The first two of many names, and how many more there are."""
    shown = ", ".join(name or "the model" for name in names[:2])
    return shown + (f" and {len(names) - 2} more" if len(names) > 2 else "")
