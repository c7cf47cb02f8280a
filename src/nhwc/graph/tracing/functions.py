"""Functions of torch and of others that the code of a model calls, and how a graph calls them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from .rearranging import einops_functions

RECORDED: tuple[Callable[..., Any], ...] = (
    *(torch.arange, torch.as_tensor, torch.empty, torch.eye, torch.full, torch.linspace),
    *(torch.logspace, torch.ones, torch.scalar_tensor, torch.tensor, torch.tril_indices),
    *(torch.triu_indices, torch.zeros, torch.cat, torch.stack, F.interpolate),
    *(torch.finfo, torch.iinfo),
)
"""Functions that do not notice a traced argument if it is a size, a device, a type or a list."""


def untraceable_functions() -> tuple[Callable[..., Any], ...]:
    """Return the functions that timm, if loaded, declares untraceable, its padding, and einops'."""
    declared, padding = map(sys.modules.get, ("timm.layers._fx", "timm.layers.padding"))
    found = tuple(declared.get_notrace_functions()) if declared else ()
    found += einops_functions()
    # `pad_same` computes with sizes in plain Python, inside layers that should be traced.
    return (*found, padding.pad_same) if padding else found


def is_of_no_user(function: Callable[..., Any]) -> bool:
    """Whether it is a function of torch's or of Python's, not one that user code wrapped."""
    home = str(getattr(function, "__module__", ""))
    return home.partition(".")[0] in ("torch", "_operator", "builtins", "math")


def spell_out(resize: fx.Node) -> None:
    """Name all arguments of a call of F.interpolate but the image, as torch does within it."""
    given = inspect.signature(F.interpolate).bind(*resize.args, **resize.kwargs)
    given.apply_defaults()
    named = dict(given.arguments)
    resize.args, resize.kwargs = (named.pop("input"),), named


def typed_like(given: tuple[Any, ...]) -> fx.Node | None:
    """The y of `x.type(y.type())`; None for other calls of `type`. No file holds a type's name."""
    named = getattr(given[1], "node", None) if len(given) == 2 else None
    if not isinstance(named, fx.Node) or (named.op, named.target) != ("call_method", "type"):
        return None
    return named.all_input_nodes[0] if len(named.args) == 1 else None
