"""Let an LSTM or a GRU return its sequence alone, where nobody reads the states that it ends in.

y, (h, c) = lstm(x)        ->    y = Recurrent(x)

A kernel of ours computes that. States to begin with that the code makes of zeros go, too: without
any, torch takes zeros.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from ..graph import bound, erase, erase_unused, module_of, replace_module
from ..graph.modules.leaves import computes_as, unlike_class
from ..graph.modules.mended import Recurrent
from ..graph.report import PassReport, Site
from ._folding_sites import name_of
from ._reporting import reported

_ZEROS = (torch.zeros, torch.zeros_like, "new_zeros")
_MOVES = ("to", "cuda", "cpu", "type_as")


def drop_states(gm: fx.GraphModule) -> PassReport:
    """Replace each LSTM and GRU that begins with zeros and whose last states are unused."""
    sites = []
    for node in list(gm.graph.nodes):
        module: Any = module_of(node)
        if not any(computes_as(module, kind) for kind in (nn.LSTM, nn.GRU)):
            continue
        given = bound(node, ("input", "hx"))
        states = given.get("hx")
        reason = unlike_class(module) or ""
        if not reason and not all(map(_is_sequence, node.users)):
            reason = "the states that it ends in are asked for"
        if not reason and not _begins_with_zeros(states):
            reason = "it begins with states that it is given"
        sites.append(Site(name_of(node), type(module).__name__, not reason, reason))
        if not reason:
            _replace(node, given["input"], module)
            for state in states if isinstance(states, list | tuple) else (states,):
                erase_unused(state)
    return reported(gm, "drop_states", sites)


def _replace(node: fx.Node, x: fx.Node, module: nn.RNNBase) -> None:
    node.args, node.kwargs = (x,), {}
    replace_module(node, Recurrent(module).train(module.training))
    for user in list(node.users):
        if _is_item(user, 0):
            node.meta = dict(user.meta)
            erase(user, node)
        else:
            node.graph.erase_node(user)


def _is_sequence(node: fx.Node) -> bool:
    """Whether `node` takes the sequence, or takes the states for nobody."""
    return _is_item(node, 0) or (_is_item(node, 1) and not node.users)


def _is_item(node: fx.Node, number: int) -> bool:
    return node.target is operator.getitem and bool(node.args[1] == number)


def _begins_with_zeros(states: Any) -> bool:
    """Whether there are none, or zeros for as many sequences as the input has."""
    each = states if isinstance(states, list | tuple) else (states,)
    return states is None or all(_is_zeros(one) for one in each)


def _is_zeros(node: Any) -> bool:
    """Whether `node` is zeros that nobody else could write into, of sizes that come from values.

    What is of one size for all inputs is a reason for torch to refuse others.
    """
    if not isinstance(node, fx.Node) or len(node.users) > 1:
        return False
    if node.target in _MOVES:
        return _is_zeros(node.args[0])
    return node.target in _ZEROS and bool(node.all_input_nodes)
