"""Compute once the tensors that torch's weight_norm, spectral_norm and pruning compute per call."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor, jit, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm, remove_spectral_norm
from torch.nn.utils.weight_norm import WeightNorm, remove_weight_norm

from ..code.mentions import mentions_of
from ..modules.leaves import hooks_of, is_leaf
from ..report import PassReport, Site

_ASKS = {"parametrizations", "is_parametrized"}
"""Names by which code reaches what a parametrization is made of, or asks whether there is one."""


def bake_weights(model: nn.Module) -> PassReport:
    """Put plain tensors in the place of those that torch's own code computes at each call.

    >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)).eval()
    >>> bake_weights(layer).applied[0].what
    'weight by _WeightNorm'
    >>> [name for name, _ in layer.named_parameters()]
    ['bias', 'weight']

    A layer in training mode stays, and one that a user's own code computes for. So do all where
    code of the model reads what a tensor is computed from.
    """
    start = time.perf_counter()
    found = [(path, part, _computed(part)) for path, part in model.named_modules()]
    found = [one for one in found if one[2]]
    reason = _reads(model, _ASKS.union(*(_parts_of(part) for _, part, _ in found))) if found else ""
    sites: list[Site] = []
    for path, part, computed in found:
        if not reason:
            _bake(part)
        sites += (Site(path, f"{name} by {how}", not reason, reason) for name, how in computed)
    return PassReport(bake_weights.__name__, tuple(sites), time.perf_counter() - start)


def _computed(part: nn.Module) -> list[tuple[str, str]]:
    """Name the tensors of `part` that torch's own code computes, and what does; [] if others do."""
    if part.training or isinstance(part, jit.ScriptModule):
        return []
    if is_parametrized(part):
        lists: Any = part.parametrizations
        steps = [step for made in lists.values() for step in made]
        own = all(type(s).__module__ == "torch.nn.utils.parametrizations" for s in steps)
        if not own or hooks_of(part) or any(step.training for step in steps):
            return []
        return [(name, ", ".join(type(s).__name__ for s in made)) for name, made in lists.items()]
    hooks = hooks_of(part)
    names = [_computed_by(hook) for hook in hooks]
    if not all(names) or len({*names}) < len(names):
        return []
    return [(name, type(hook).__name__) for name, hook in zip(names, hooks, strict=True)]


def _computed_by(hook: Any) -> str:
    """Return the name of the tensor that a hook of torch's computes; '' for any other hook."""
    if isinstance(hook, WeightNorm | SpectralNorm):
        return str(hook.name)
    pruning = type(hook).__module__ == prune.__name__
    return str(hook._tensor_name) if pruning else ""


def _parts_of(part: nn.Module) -> set[str]:
    """Name the tensors that go with the hooks of `part`."""
    ends = ("g", "v", "u", "orig", "mask")
    return {f"{_computed_by(hook)}_{end}" for hook in hooks_of(part) for end in ends}


def _reads(model: nn.Module, gone: set[str]) -> str:
    """Say which code of `model` may read a tensor of a name in `gone`; '' for none."""
    for path, part in model.named_modules():
        home = type_before_parametrizations(part).__module__
        if is_leaf(part) or home.startswith("torch.nn."):
            continue
        said = mentions_of(part)
        named = gone & (said.otherwise | said.read_off_others | said.names)
        if said.unseen or named:
            why = said.unseen or f"it reads {min(named)}"
            return f"the code of {path or type(part).__name__} may need it: {why}"
    return ""


def _bake(part: nn.Module) -> None:
    if is_parametrized(part):
        _bake_parametrized(part)
        return
    for hook in hooks_of(part):
        name, before = _computed_by(hook), dict(part.named_parameters(recurse=False))
        if isinstance(hook, WeightNorm):
            remove_weight_norm(part, name)
        elif isinstance(hook, SpectralNorm):
            remove_spectral_norm(part, name)
            # Torch looks for its own hook here, and does not find it under what it wraps around it.
            hooks: Any = part._load_state_dict_pre_hooks
            for key, wrapped in [*hooks.items()]:
                if getattr(getattr(wrapped, "hook", wrapped), "fn", None) is hook:
                    del hooks[key]
        else:
            prune.remove(part, name)
        sources = [before[gone] for gone in before.keys() - part._parameters.keys()]
        part.get_parameter(name).requires_grad_(any(p.requires_grad for p in sources))


def _bake_parametrized(part: nn.Module) -> None:
    """As `remove_parametrizations`, which would take the property off the class of the original."""
    lists: Any = part.parametrizations
    values: dict[str, tuple[Tensor, list[Tensor]]] = {
        name: (getattr(part, name).detach().clone(), [*made.parameters(recurse=False)])
        for name, made in lists.items()
    }
    part.__class__ = type_before_parametrizations(part)
    del part.parametrizations
    for name, (value, sources) in values.items():
        if sources:
            wanted = any(source.requires_grad for source in sources)
            setattr(part, name, nn.Parameter(value, wanted))  # An LSTM lists it then.
        else:
            part.register_buffer(name, value)
