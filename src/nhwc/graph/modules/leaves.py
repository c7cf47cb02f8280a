"""Decide which modules a graph calls as a whole, and find hooks that a graph would not call."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx, jit, nn
from torch.nn import functional

from ...models.rebound import HOOKS

HOLDERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
"""Modules that only hold others."""


def is_leaf(module: nn.Module) -> bool:
    """Whether a graph calls this module as a whole, as it does with layers of torch and of nhwc.

    A subclass that inherits `forward` and `__call__` is the layer it inherits from; one that
    overrides either is user code, and is traced.
    """
    return runs_layer(module) and not calls_otherwise(module)


def runs_layer(module: nn.Module) -> bool:
    """Whether the `forward` of this module is that of a layer of torch or of nhwc."""
    if isinstance(module, (*HOLDERS, fx.GraphModule)) or is_set_from_outside(module):
        return False
    home = definer(type(module), "forward").__module__
    if not home.startswith(("torch.nn.", "torch.ao.nn.", "nhwc.graph.", "nhwc.operators.")):
        return is_frozen_batch_norm(module)
    helper = definer(type(module), "_conv_forward")
    return helper is object or helper.__module__.startswith("torch.")


def is_set_from_outside(module: nn.Module) -> bool:
    """Whether a call of `module` runs what was set on it alone, and not its class's code.

    Who takes its own code off again, as accelerate does, may set the class's.

    >>> layer = nn.ReLU()
    >>> layer.forward = layer.forward
    >>> is_set_from_outside(layer)
    False
    """
    held = {name: vars(module)[name] for name in CALLED if name in vars(module)}
    return any(
        getattr(one, "__self__", None) is not module
        or one.__func__ is not getattr(type(module), name, None)
        for name, one in held.items()
    )


CALLED = ("forward", "_conv_forward")


def replaced_in_torch() -> str | None:
    """Say what others have put in the place of torch's own code for all modules; None if nothing.

    >>> print(replaced_in_torch())
    None
    """
    every = nn.modules.module
    if every._global_forward_hooks or every._global_forward_pre_hooks:
        return "there are hooks on all modules, which a graph would not call"
    kinds = [one for one in vars(nn).values() if isinstance(one, type)]
    bases = {base for kind in kinds for base in kind.__mro__} - {object, *HOLDERS}
    places: list[tuple[Any, Iterable[str]]] = [
        (functional, _LAYERS),
        (torch, _OPERATORS),
        (torch.Tensor, _OPERATORS & vars(torch.Tensor).keys()),
    ]
    for owner, names in places + [(base, (*CALLED, "__call__")) for base in bases]:
        held = vars(owner)
        for name in names:
            called = held.get(name)
            if _FOUND.get((owner, name), _FOUND) is called:
                continue
            if not _is_of_torch(called):
                return f"others have replaced {owner.__name__}.{name}, which a graph would not run"
            if not hasattr(called, "__wrapped__"):  # A trace's own would keep its model alive.
                _FOUND[owner, name] = called
    return None


_FOUND: dict[tuple[Any, str], Any] = {}
"""What stood in these places before and was torch's: every trace looks at more than a thousand."""


def _is_of_torch(called: Any) -> bool:
    space = getattr(called, "__globals__", {"__name__": type(called).__module__})
    return str(space.get("__name__")).partition(".")[0] in ("torch", "nhwc", "builtins")


def _functions_in(owner: Any) -> set[str]:
    kinds = types.FunctionType, types.BuiltinFunctionType
    return {one for one in dir(owner) if one[0] != "_" and isinstance(getattr(owner, one), kinds)}


_LAYERS = _functions_in(functional)
_OPERATORS = _functions_in(torch._C._VariableFunctions) & vars(torch).keys()
"""A graph names these and calls what stands there, and passes take them for what they are."""


def calls_otherwise(module: nn.Module) -> bool:
    """Whether a call of `module` runs other code of the user's before its `forward`."""
    home = definer(type(module), "__call__").__module__
    return not home.startswith(("torch.", "nhwc.graph."))


def computes_as(module: object, kind: type[nn.Module]) -> bool:
    """Whether it is a layer of this kind, or of a subclass that inherits its `forward`.

    >>> class OneGroup(nn.GroupNorm):
    ...     def __init__(self, channels: int) -> None:
    ...         super().__init__(1, channels)
    >>> computes_as(OneGroup(4), nn.GroupNorm), computes_as(nn.Softmax2d(), nn.Softmax)
    (True, False)
    """
    own: Any = type(module)
    return isinstance(module, kind) and own.forward is kind.forward


def is_frozen_batch_norm(module: nn.Module) -> bool:
    """Whether this is torchvision's FrozenBatchNorm2d; torchvision is not imported to find out."""
    misc = sys.modules.get("torchvision.ops.misc")
    if misc is None:
        return False
    return definer(type(module), "forward") is misc.FrozenBatchNorm2d


_HOOKED = "it has hooks, which a graph of its inside would not call"


IN_OWN_CALL = "a part with a __call__ of its own, whose code is running, cannot be traced"


def opaque_by_nature(module: nn.Module) -> str | None:
    """Say why no graph may replace the inside of `module`, whatever its code; None if it may."""
    if isinstance(module, jit.ScriptModule):
        return "it is a TorchScript module"
    if any(vars(module).get(kind) for kind in HOOKS):
        return _HOOKED
    for name, value in vars(module).items():
        if hasattr(type(value), "__next__"):
            return f"it keeps an iterator, self.{name}, of which nobody can tell how far it is"
    return None


def unlike_class(module: nn.Module) -> str | None:
    """Say why a call of a layer does more than the code of its class; None if it does just that.

    >>> layer = nn.Identity()
    >>> layer.forward = lambda x: x + 1
    >>> unlike_class(layer)
    'it has a forward of its own'
    """
    own = "it has a forward of its own" if is_set_from_outside(module) else None
    return opaque_by_nature(module) or own


def watched_from_outside(module: nn.Module) -> str | None:
    """As `opaque_by_nature`, for a recording, which sees what a model's own hooks do."""
    if any(_is_of_library(hook) for hook in hooks_of(module)):
        hooks = [hook for hook in hooks_of(module) if not _is_of_library(hook)]
        return _HOOKED if hooks else None
    return opaque_by_nature(module)


def _is_of_library(hook: Any) -> bool:
    """Whether the model itself set this hook in its first call: transformers' collect features."""
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def watchers(module: nn.Module) -> tuple[int, ...]:
    """A module's mode, and the identities of its hooks and of a `forward` set from outside."""
    if isinstance(module, jit.ScriptModule):  # Reading its attributes would change its dictionary.
        return ()
    return (module.training, id(vars(module).get("forward")), *map(id, hooks_of(module)))


def runs_hooks(module: nn.Module) -> bool:
    """Whether a call of the module does more than the `forward` of its class."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return bool(hooks) or is_set_from_outside(module) or calls_otherwise(module)


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks of a module, of every kind."""
    return [hook for kind in HOOKS for hook in vars(module)[kind].values()]


def definer(kind: type, name: str) -> type:
    """Return the class that defines the attribute `name` of `kind`; `object` if none does."""
    return next((base for base in kind.__mro__ if name in vars(base)), object)
