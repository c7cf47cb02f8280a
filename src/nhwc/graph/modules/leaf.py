"""Modules that any tracer of FX keeps whole, as it keeps torch's own."""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.utils import _pytree as pytree


class Leaf(nn.Module):
    """A module that decides by the shapes and strides of its inputs, which a trace does not know.

    FX steps into every module that is not of `torch.nn`; of this one it records the call.

    >>> graph = fx.symbolic_trace(nn.Sequential(nn.ReLU(), Leaf())).graph
    >>> [node.target for node in graph.nodes if node.op == "call_module"]
    ['0', '1']
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        traced = _tracer_of((args, kwargs)) if is_fx_symbolic_tracing() else None
        if traced is None:
            return super().__call__(*args, **kwargs)
        path = traced.path_of_module(self)
        if traced.is_leaf_module(self, path):
            return super().__call__(*args, **kwargs)
        return traced.create_proxy("call_module", path, args, kwargs)

    def extra_repr(self) -> str:
        """All that it is set to: layers that print alike are taken for the same."""
        own = vars(self).keys() - vars(nn.Module()).keys()
        return ", ".join(f"{key}={value!r}" for key, value in vars(self).items() if key in own)


def _tracer_of(inputs: Any) -> fx.Tracer | None:
    """The tracer that records what is done to any of `inputs`."""
    for one in pytree.tree_leaves(inputs):
        if isinstance(one, fx.Proxy) and isinstance(one.tracer, fx.Tracer):
            return one.tracer
    return None
