"""Which nodes of a graph write into something that was there before."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch.nn.functional as F
from torch import fx

from .edit import module_of

_OPERATORS = {
    *(operator.iadd, operator.iand, operator.iconcat, operator.ifloordiv, operator.ilshift),
    *(operator.imatmul, operator.imod, operator.imul, operator.ior, operator.ipow),
    *(operator.irshift, operator.isub, operator.itruediv, operator.ixor),
    *(operator.setitem, operator.delitem),
}


_MAY_BE_VIEWS = {
    *("broadcast_to", "channel_shuffle", "channelshuffle", "chunk", "contiguous", "detach"),
    *("diagonal", "double", "expand", "expand_as", "flatten", "float", "getattr", "getitem"),
    *("half", "identity", "interleave", "movedim", "narrow", "permute", "ravel", "real"),
    *("reshape", "reshape_as", "select", "split", "squeeze", "swapaxes", "swapdims", "t"),
    *("tensor_split", "to", "transpose", "type", "type_as", "unbind", "unflatten", "unfold"),
    *("unsqueeze", "view", "view_as"),
}


def may_be_view(name: str) -> bool:
    """Whether what a function, method or layer of this name returns may be its first argument.

    >>> may_be_view("Flatten"), may_be_view("relu")
    (True, False)
    """
    plain = name.lower().rstrip("_")
    return plain in _MAY_BE_VIEWS or "dropout" in plain


def written_into(node: fx.Node) -> Any:
    """What `node` writes into, by its own account: `add_`, `out=`, `inplace=True`; None if nothing.

    >>> graph = fx.symbolic_trace(lambda x: F.relu(x.exp(), True)).graph
    >>> [str(written_into(node)) for node in graph.nodes]
    ['None', 'None', 'exp', 'None']
    """
    first = node.args[0] if node.args else None
    if node.kwargs.get("inplace") is True:
        return node.kwargs.get("input", first)
    if node.kwargs.get("out") is not None:
        return node.kwargs["out"]
    if node.op == "call_module":
        return first if getattr(module_of(node), "inplace", False) else None
    home = getattr(node.target, "__module__", "")
    if home == operator.add.__module__:  # where `and_` is `&`
        return first if node.target in _OPERATORS else None
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
        return first
    if home == F.__name__ and len(node.args) > 1:
        assert callable(node.target)
        parameters = list(inspect.signature(node.target).parameters)
        if dict(zip(parameters, node.args, strict=False)).get("inplace") is True:
            return first
    return None
