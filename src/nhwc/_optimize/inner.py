"""Plan the graphs inside a model that cannot be traced as a whole.

The code of an opaque part calls the graphs inside it with shapes that only a run shows: some in a
loop, some never. So the model runs on the examples, and each call of a graph is noted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, fx, nn
from torch._C._functorch import peek_interpreter_stack

from ..graph import graphs
from ..graph.modules.leaves import runs_hooks
from ..models.places import by_call, by_place
from ..models.preserve import copy_as_is, preserved
from ..models.trees import tensors_of
from ..optimized import Optimized, is_known, signature
from ..optimized.recipes import order_of
from ..verify import cloned

_Model = TypeVar("_Model", bound=nn.Module)

_MOST = 4
"""The most sets of shapes for which one graph is planned: each plan holds weights of its own."""


@dataclass
class Use:
    """A graph inside an opaque part, and inputs of one set of shapes that it was given.

    `elements` counts what it was given over all calls, `reason` says why it is not to be planned.
    `lies` tells how what it returned lies in memory.
    """

    path: str
    graph: fx.GraphModule
    inputs: tuple[Any, ...] = ()
    elements: int = 0
    reason: str = ""
    lies: Any = None


def inner_graphs(model: nn.Module) -> dict[str, fx.GraphModule]:
    """Every graph in `model` but itself, by its path."""
    return {path: graph for path, graph in graphs(model) if graph is not model}


def uses(model: nn.Module, examples: Sequence[tuple[Any, ...]]) -> list[Use]:
    """Run `examples`, and note which shapes reach the graphs inside `model`, one entry for each."""
    found: dict[str, dict[Any, Use]] = {}
    with torch.no_grad(), preserved(model), ExitStack() as stack:
        for path, graph in inner_graphs(model).items():
            for handle in _watch(path, graph, found.setdefault(path, {})):
                stack.callback(handle.remove)
        for inputs in examples:
            args, named = by_call(model, cloned(inputs))
            model(*args, **named)
    result: list[Use] = []
    for path, graph in inner_graphs(model).items():
        # The smallest images of a pyramid of features take the least time.
        served = sorted(found[path].values(), key=lambda use: -use.elements)
        for use in served[_MOST:]:
            use.reason = use.reason or f"it is planned for {_MOST} larger inputs"
        result += served or [Use(path, graph, reason="the example does not call it")]
    return result


def twin(model: _Model) -> _Model:
    """A copy of the modules of `model`; the parameters and buffers in it are the same ones."""
    return copy_as_is(model, {id(t): t for t in (*model.parameters(), *model.buffers())})


def put(model: nn.Module, others: Mapping[Any, nn.Module]) -> None:
    """Put others in the place of some modules, wherever those hang in `model`."""
    for holder in list(model.modules()):
        for name, child in holder._modules.items():
            if child in others:
                holder._modules[name] = others[child]


def unplanned(model: nn.Module) -> nn.Module:
    """`model` with plain graphs in the place of planned ones: all that happens can be seen.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3))
    >>> unplanned(model) is model
    True
    """
    if _is_planned(model):
        return unplanned(model.portable)
    if not any(map(_is_planned, model.modules())):
        return model
    copied = twin(model)
    put(copied, {m: m.portable for m in copied.modules() if _is_planned(m)})
    return copied


def _is_planned(module: nn.Module) -> TypeGuard[Optimized]:
    """Whether it does no more than its graph, which has no hooks of the whole."""
    return isinstance(module, Optimized) and not runs_hooks(module)


def _watch(path: str, graph: fx.GraphModule, found: dict[Any, Use]) -> list[Any]:
    """Hooks that note every call of `graph` in `found`."""
    running: dict[str, Use] = {}

    def enter(_: nn.Module, args: Any, named: Any) -> None:
        given = by_place(graph, args, named) if named else args
        if torch._C._is_any_autocast_enabled() or torch.is_grad_enabled():
            reason = "the code around it sets autocast or gradients, and no plan serves there"
            use = found.setdefault("modes", Use(path, graph, reason=reason))
        elif peek_interpreter_stack() is not None:
            reason = "the code around it runs it under vmap or another transform of torch.func"
            use = found.setdefault("modes", Use(path, graph, reason=reason))
        elif given is None or not is_known(given):
            reason = "it is given more than tensors and numbers"
            use = found.setdefault(None, Use(path, graph, reason=reason))
        elif (key := signature(given)) in found:
            use = found[key]
        else:
            use = found[key] = Use(path, graph, cloned(given))
        use.elements += sum(tensor.numel() for tensor in tensors_of((args, named)))
        running[path] = use

    def leave(_: nn.Module, args: Any, named: Any, result: Any) -> None:
        if peek_interpreter_stack() is not None:
            return
        use, lies = running[path], [*map(order_of, tensors_of(result))]
        if _shared((args, named), result):
            use.reason = "what it returns shares memory, and the code around it may write there"
        elif not use.reason and use.lies not in (None, lies):
            use.reason = "of inputs of one shape, it returns what lies otherwise in memory"
        use.lies = lies

    return [
        graph.register_forward_pre_hook(enter, with_kwargs=True),
        graph.register_forward_hook(leave, with_kwargs=True),
    ]


def _shared(args: Any, result: Any) -> bool:
    """Whether a write into one thing returned shows in another, or in what was given.

    A plan may give each of them memory of its own.
    """
    given, returned = (
        [t.untyped_storage().data_ptr() for t in tensors_of(tree) if _has_memory(t)]
        for tree in (args, result)
    )
    return len({*returned}) < len(returned) or not {*returned}.isdisjoint(given)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and bool(tensor.untyped_storage().data_ptr())
