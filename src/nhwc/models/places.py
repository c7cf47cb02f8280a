"""The arguments of a call by their places, as graphs and plans know them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any

from torch import nn

_ORDER = (
    *(Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY),
    *(Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD),
)


def in_order(signature: Signature) -> list[Parameter]:
    """The parameters as a graph lists them: what is given by name alone follows the others.

    >>> [one.name for one in in_order(inspect.signature(lambda x, *rest, scale: x))]
    ['x', 'scale', 'rest']
    """
    return sorted(signature.parameters.values(), key=lambda one: _ORDER.index(one.kind))


def places(signature: Signature) -> list[str]:
    """The names of the arguments that have places; behind `*args` a name has none.

    >>> places(inspect.signature(lambda x, *, scale: x))
    ['x', 'scale']
    """
    kinds = _ORDER[: 2 if is_open_ended(signature) else 3]
    return [one.name for one in in_order(signature) if one.kind in kinds]


def is_open_ended(signature: Signature) -> bool:
    """Whether it takes any number of arguments by place, in `*args`."""
    return any(one.kind is one.VAR_POSITIONAL for one in signature.parameters.values())


def signature_of(model: Callable[..., Any]) -> Signature:
    """The arguments of a call. What `optimize` returns says by `takes` whose it takes."""
    known = getattr(model, "takes", None)
    if isinstance(known, Signature):
        return known
    return inspect.signature(model.forward if isinstance(model, nn.Module) else model)


def by_place(
    model: Callable[..., Any], inputs: Sequence[Any], named: Mapping[str, Any]
) -> tuple[Any, ...] | None:
    """All arguments in their order, up to the last that is not what `model` takes by itself.

    What goes into `**kwargs` is a dict behind all others, in the order of the call.

    >>> def forward(x, mask=None, size=8, *, scale=1): ...
    >>> by_place(forward, (1,), {"size": 4}), by_place(forward, (1,), {"scale": 4})
    ((1, None, 4), (1, None, 8, 4))
    >>> by_place(forward, (1,), {"mask": None})
    (1,)
    >>> by_place(lambda x, mask=None, **more: x, (1,), {"scale": 4})
    (1, None, {'scale': 4})

    None if an argument has no place.
    """
    signature = signature_of(model)
    names = places(signature)
    try:
        bound = signature.bind(*inputs, **named)
    except TypeError:
        return None
    more = {name: value for name, value in named.items() if name not in names}
    if (not names and not more) or (more and is_open_ended(signature)):
        return None
    bound.apply_defaults()
    given = [*(bound.arguments[name] for name in names), *bound.args[len(names) :]]
    if more:
        return (*given, more)
    while len(given) > max(1, len(inputs)) and _is_default(signature, names, given):
        given.pop()
    return tuple(given)


def _is_default(signature: Signature, names: Sequence[str], given: Sequence[Any]) -> bool:
    """Whether the last argument is what it would be if it were left out."""
    place = len(given) - 1
    return place < len(names) and given[place] is signature.parameters[names[place]].default


def by_call(
    model: Callable[..., Any], inputs: Sequence[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What to call `model` with, by place and by name, to give it `inputs` by their places.

    Options of a decorated `forward` go by name: its decorator may give some by name itself.

    >>> class Scaled(nn.Module):
    ...     def forward(self, x, *, scale, **more):
    ...         return x * scale
    >>> by_call(Scaled(), (2, 3, {"size": 4}))
    ((2,), {'scale': 3, 'size': 4})
    """
    if not isinstance(model, nn.Module):
        return tuple(inputs), {}
    signature = signature_of(model)
    names = places(signature)
    parameters = signature.parameters
    hands_on = _hands_on(model.forward)
    alone = [
        name
        for place, name in enumerate(names)
        if parameters[name].kind is Parameter.KEYWORD_ONLY
        or (hands_on and place and parameters[name].default is not Parameter.empty)
    ]
    first = len(names) - len(alone)
    takes_any_name = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    more, named = inputs[len(names) :], dict(zip(alone, inputs[first:], strict=False))
    if hands_on:
        named = without_unset(named, nones_of(signature))
    if more and takes_any_name and isinstance(more[0], dict):
        named |= more[0]
    elif more or is_open_ended(signature):
        # A `__call__` of the model's own may take more than its `forward`.
        return tuple(inputs), {}
    return tuple(inputs[:first]), named


def _hands_on(forward: Callable[..., Any]) -> bool:
    """Whether it is a decorator's, which takes what it is given by any place and any name."""
    if not hasattr(forward, "__wrapped__"):
        return False
    own = inspect.signature(forward, follow_wrapped=False).parameters.values()
    return {Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD} <= {one.kind for one in own}


def nones_of(signature: Signature) -> frozenset[str]:
    """The arguments that are None where they are left out."""
    return frozenset(one.name for one in signature.parameters.values() if one.default is None)


def without_unset(named: Mapping[str, Any], nones: Collection[str]) -> dict[str, Any]:
    """What a caller gave: None is what is left out, for which a decorator may have another value.

    >>> without_unset({"hidden": None, "scale": 2}, {"hidden"})
    {'scale': 2}
    """
    return {k: v for k, v in named.items() if v is not None or k not in nones}
