"""Leave a model as it was found: put back whatever a run changes in it, and copy it as it is."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

from .contents import home_of, put_back, slots_of, with_contents
from .rebound import kept_outside, rebind
from .trees import has_strides

_Model = TypeVar("_Model", bound=nn.Module)
_Restore = Callable[[], None]

turn = threading.RLock()
"""Torch has some things once for all threads: random numbers, a profiler, what tracers replace."""


def copy_as_is(model: _Model, memo: dict[int, Any] | None = None) -> _Model:
    """Copy `model` deeply; each module of the copy trains, or not, as the one it was made of.

    Torch's own copies need not: those of torchvision's feature extractors always train, and those
    of graphs lose their hooks. Hooks that enclose the model enclose the copy.

    >>> copy_as_is(nn.ReLU().eval()).training
    False
    """
    with turn, warnings.catch_warnings():
        # An exported program has trees of leaves, which torch copies by a class that it deprecated.
        warnings.filterwarnings("ignore", ".*LeafSpec", FutureWarning)
        known = {} if memo is None else memo
        known |= {id(one): one for part in model.modules() for one in kept_outside(part)}
        result = copy.deepcopy(model, known)
        for part in model.modules():
            _copy_slots(part, known)
    # TorchScript that was frozen has no mode.
    modes = {
        name: vars(part)["training"]
        for name, part in model.named_modules(remove_duplicate=False)
        if "training" in vars(part)
    }
    called = {
        name: _called(part)
        for name, part in model.named_modules(remove_duplicate=False)
        # torch.export hangs hooks of its own on what it makes.
        if isinstance(part, fx.GraphModule) and "eval" not in vars(part)
    }
    for name, part in result.named_modules(remove_duplicate=False):
        if name in modes:
            part.training = modes[name]
        if name in called:
            vars(part).update(copy.deepcopy(called[name], known))
    for part in result.modules():
        rebind(part, known)
    return result


def _called(module: nn.Module) -> dict[str, Any]:
    """The attributes that hold the hooks of `module`, and a `forward` set from outside."""
    kinds = ("_forward_", "_backward_", "_is_full_backward_")
    named = vars(module).items()
    return {name: held for name, held in named if name == "forward" or name.startswith(kinds)}


def _copy_slots(module: nn.Module, memo: dict[int, Any]) -> None:
    """Copy the `__slots__` of `module`, too: torch's modules copy only their dictionary."""
    for name in slots_of(module):
        if hasattr(module, name) and id(module) in memo:
            setattr(memo[id(module)], name, copy.deepcopy(getattr(module, name), memo))


def own(tensor: Tensor, memo: dict[int, Any] | None = None) -> Tensor:
    """`tensor` in memory of its own, with its strides, shared where `memo` says that its is.

    torch copies no nested tensor deeply and of sparse ones those in coordinates, and clones all.
    """
    return copy.deepcopy(tensor.detach(), memo) if has_strides(tensor) else tensor.detach().clone()


@contextlib.contextmanager
def preserved(model: nn.Module, *, weights: int = 0) -> Iterator[None]:
    """Put back flags, attributes, buffers, gradients, weight strides and the random state.

    Also the numbers of weights, if these take no more than `weights` bytes: an embedding with
    `max_norm` writes into its own.

    Threads take turns: one that looked at a model within another's would put back what that one
    made of it.

    >>> net = nn.BatchNorm2d(3)
    >>> with preserved(net):
    ...     _ = net(torch.randn(4, 3, 8, 8))
    >>> net.num_batches_tracked
    tensor(0)
    """
    with turn:
        parameters = list(model.parameters())
        restores = [_remember_parameter(parameter) for parameter in parameters]
        restores += [_remember_data(buffer) for buffer in model.buffers()]
        modules = list(model.modules())
        restores += [_remember_slots(module) for module in modules if slots_of(module)]
        # Sparse tensors have no `nbytes`.
        if sum(p.numel() * p.itemsize for p in parameters if not is_lazy(p)) <= weights:
            restores += map(_remember_data, parameters)
        known = {id(tensor) for tensor in (*parameters, *model.buffers())}
        homes = {home_of(module) for module in modules}
        # Most attributes of a module are dictionaries of hooks, and empty: no copy tells more.
        empty = [one for part in modules for one in vars(part).values() if _is_empty(one)]
        known.update(map(id, empty))
        held = [with_contents(vars(module), known, homes) for module in modules]
        try:
            with undrawn():
                yield
        finally:
            for one in empty:
                if one:
                    one.clear()
            for one in held:
                put_back(one)
            for restore in reversed(restores):
                restore()


def _is_empty(value: Any) -> bool:
    return type(value) in (dict, OrderedDict, list, set) and not value


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Put back the random generators of torch, of Python and, where it is loaded, of numpy.

    Threads take turns: one that began within another's would put back what that one drew.
    """
    with turn:
        plain, numpy = random.getstate(), sys.modules.get("numpy.random")
        drawn = None if numpy is None else numpy.get_state(legacy=False)
        with torch.random.fork_rng(devices=cards()):
            try:
                yield
            finally:
                random.setstate(plain)
                if numpy is not None:
                    numpy.set_state(drawn)


def cards() -> list[int]:
    """The GPUs whose generators torch has; before it begins with them there are none."""
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


def seed_generators(number: int) -> None:
    """Seed those generators of torch that `undrawn` puts back.

    `torch.manual_seed` also leaves a seed for GPUs that torch has not begun with, which nobody can
    take back: the user's own would be lost.
    """
    torch.default_generator.manual_seed(number)
    if cards():
        torch.cuda.manual_seed_all(number)


def mark_generators() -> None:
    """Put torch's and Python's generators, within `undrawn`, where no code that seeds puts them.

    Code that seeds as an earlier run of it did would leave them where it found them.
    """
    torch.default_generator.manual_seed(_MARK)
    random.seed(_MARK)


_MARK = 0x9E3779B97F4A7C15
"""A seed that nobody chooses."""


def drawn_so_far() -> tuple[Any, ...]:
    """What changes whenever torch's, Python's or numpy's generator is asked, to be compared."""
    numpy = sys.modules.get("numpy.random")
    state = {} if numpy is None else numpy.get_state(legacy=False)["state"]
    words = [one.tolist() if hasattr(one, "tolist") else one for one in state.values()]
    cards = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    states = [one.numpy().tobytes() for one in (torch.get_rng_state(), *cards)]
    return states, random.getstate(), words


def _remember_parameter(parameter: nn.Parameter) -> _Restore:
    grad, wanted = parameter.grad, parameter.requires_grad
    restores = [_remember_place(parameter)]
    if grad is not None:
        restores += [_remember_data(grad), _remember_place(grad)]

    def restore() -> None:
        if parameter.grad is not grad:
            parameter.grad = grad
        for one in reversed(restores):
            one()
        if parameter.requires_grad is not wanted:  # which torch lets nobody set on some tensors
            parameter.requires_grad_(wanted)

    return restore


def _remember_slots(module: nn.Module) -> _Restore:
    """Remember what lies in the `__slots__` of a module, which few have, and not in its dict."""
    names = slots_of(module)
    held = {name: with_contents(getattr(module, name)) for name in names if hasattr(module, name)}

    def restore() -> None:
        for name in names:
            if name in held:
                object.__setattr__(module, name, put_back(held[name]))
            elif hasattr(module, name):
                object.__delattr__(module, name)

    return restore


def _remember_place(tensor: Tensor) -> _Restore:
    """Remember the memory of a tensor and its strides, which a conversion replaces."""
    data = tensor.data

    def restore() -> None:
        if not is_lazy(tensor) and (place_of(data) != place_of(tensor)):
            tensor.data = data

    return restore


def place_of(tensor: Tensor) -> tuple[object, ...]:
    """A tensor's device, type, address and strides: equal until it is given other memory."""
    strided = has_strides(tensor) and not tensor.is_meta
    return (tensor.device, tensor.dtype, *((tensor.data_ptr(), tensor.stride()) if strided else ()))


def _remember_data(tensor: Tensor) -> _Restore:
    if tensor.is_meta or is_lazy(tensor):
        return _nothing
    copy = tensor.detach().clone()

    def restore() -> None:
        # Batch norm writes its statistics without raising their version: only the values tell. A
        # tensor nobody wrote to is not written to here either: it may be shared or mapped.
        pairs = zip(_stored(tensor.detach()), _stored(copy), strict=True)
        if not all(torch.equal(now, then) for now, then in pairs):
            with torch.no_grad():
                tensor.copy_(copy)

    return restore


def _stored(tensor: Tensor) -> tuple[Tensor, ...]:
    """Tensors that can be compared and hold what a tensor is: those of a sparse one, or itself."""
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    if tensor.is_nested:
        return tuple(tensor.unbind())
    return (tensor.to_dense() if tensor.is_mkldnn else tensor,)


def _nothing() -> None:
    pass
