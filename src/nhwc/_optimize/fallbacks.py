"""What a plan leaves to torch, what that takes, and why: the list of what could be gained next."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..graph.nodes.edit import module_of
from ..models.trees import tensors_of
from ..plan import Plan
from ..plan.recognize import is_opaque
from ..plan.specs import Layer, OperatorSpec
from ..verify import cloned
from .report import Fallback


def fallbacks(plan: Plan, graph: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Fallback, ...]:
    """The operators of `plan` that torch computes, the most costly first.

    The times are those of the processor: on another device they say nothing, and are 0.
    """
    on_cpu = all(tensor.device.type == "cpu" for tensor in tensors_of(tuple(inputs)))
    with torch.no_grad():
        seconds = plan.program.step_seconds(cloned(tuple(inputs))) if on_cpu else {}
    whole = sum(seconds.values())
    found: dict[tuple[str, str], list[Layer]] = defaultdict(list)
    for layer in plan.layers:
        if plan.choice[layer.node].implementation.name == "torch":
            found[_operator(layer), _reason(plan, graph, layer)].append(layer)
    made = []
    for (operator, reason), layers in found.items():
        took = sum(seconds.get(layer.name, 0.0) for layer in layers)
        places = tuple(layer.name for layer in layers)
        made.append(Fallback(operator, places, took, took / whole if whole else 0.0, reason))
    return tuple(sorted(made, key=lambda one: -one.seconds))


def _operator(layer: Layer) -> str:
    """`conv2d`, `softmax`, or the class of a module."""
    module = module_of(layer.node)
    if isinstance(layer.spec, OperatorSpec) and module is not None:
        return type(module).__name__
    return layer.spec.key.split(" ")[0].split("(")[0]


def _reason(plan: Plan, graph: fx.GraphModule, layer: Layer) -> str:
    rivals = len(plan.timings[layer.node])
    if rivals > 1:
        return f"torch's kernel was the fastest of {rivals}, or the whole is faster with it"
    if is_opaque(graph, layer.node):
        return "the code of this part cannot be looked into"
    operator = _operator(layer)
    if operator in _AS_MANY_AS_FOUND:
        return "how many results it has depends on values"
    spec = layer.spec
    said = spec.arguments if isinstance(spec, OperatorSpec) else ""
    kinds = {*re.findall(r"\d:(\w+)", said)} - {"float32"}
    if kinds:
        return f"no kernel of ours for {operator} of {' and '.join(sorted(kinds))} tensors"
    return f"no kernel of ours for {operator} on these shapes and arguments"


_AS_MANY_AS_FOUND = {"nonzero", "argwhere", "masked_select", "nms", "batched_nms", "unique"}
