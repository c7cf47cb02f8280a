"""Let an LSTM or a GRU return its sequence alone: a kernel of ours computes that.

y, (h, c) = lstm(x)        ->    y = Recurrent(x),  h = torch.stack([y[-1]])

The states that the last layer ends in stand in the sequence. States to begin with that the code
makes of zeros go, too: without any, torch takes zeros.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn

from ..graph import bound, erase, erase_unused, module_of, replace_module
from ..graph.modules.leaves import computes_as, unlike_class
from ..graph.modules.mended import Recurrent
from ..graph.report import PassReport, Site
from ._folding_sites import name_of
from ._matching import is_item
from ._reporting import reported

_ZEROS = (torch.zeros, torch.zeros_like, "new_zeros")
_MOVES = ("to", "cuda", "cpu", "type_as")


def drop_states(gm: fx.GraphModule) -> PassReport:
    """Replace each LSTM and GRU that begins with zeros, unless other states than those of its last
    layer are read."""
    sites = []
    for node in list(gm.graph.nodes):
        module: Any = module_of(node)
        if not any(computes_as(module, kind) for kind in (nn.LSTM, nn.GRU)):
            continue
        given = bound(node, ("input", "hx"))
        states = given.get("hx")
        reason = unlike_class(module) or ""
        ends = _ends(node, module)
        if not reason and ends is None:
            reason = "states that it ends in are read, and not those of its last layer alone"
        if not reason and not _begins_with_zeros(states):
            reason = "it begins with states that it is given"
        sites.append(Site(name_of(node), type(module).__name__, not reason, reason))
        if not reason:
            _replace(node, given["input"], module, ends or ())
            for state in states if isinstance(states, list | tuple) else (states,):
                erase_unused(state)
    return reported(gm, "drop_states", sites)


def _ends(node: fx.Node, module: nn.RNNBase) -> Sequence[fx.Node] | None:
    """What reads the states of all layers, of which only those of the last one count.

    None if others count, or the states between the gates of an LSTM.
    """
    found: list[fx.Node] = []
    for user in node.users:
        if is_item(user, 0):
            continue
        if not is_item(user, 1):
            return None
        hidden = [user]
        if isinstance(module, nn.LSTM):
            if any(not is_item(one, 0) and one.users for one in user.users):
                return None
            hidden = [one for one in user.users if is_item(one, 0)]
        found += hidden
    several = module.num_layers > 1
    if several and not all(_is_of_last(one, module) for end in found for one in end.users):
        return None
    return found


def _is_of_last(node: fx.Node, module: nn.RNNBase) -> bool:
    """Whether `node` takes a state of the last layer, counted from the end."""
    index = node.args[1] if node.target is operator.getitem else None
    return type(index) is int and -1 - module.bidirectional <= index < 0


def _replace(node: fx.Node, x: fx.Node, module: nn.RNNBase, ends: Sequence[fx.Node]) -> None:
    node.args, node.kwargs = (x,), {}
    replace_module(node, Recurrent(module).train(module.training))
    read = [end for end in ends if end.users]
    if read:
        with node.graph.inserting_after(node):
            last = node.graph.call_function(torch.stack, ([],))
        with node.graph.inserting_before(last):
            last.args = (_last_states(node, module),)
        for end in read:
            end.replace_all_uses_with(last)
    for user in list(node.users):
        if is_item(user, 0):
            node.meta = dict(user.meta)
            erase(user, node)
        elif is_item(user, 1):
            for one in list(user.users):
                node.graph.erase_node(one)
            node.graph.erase_node(user)


def _last_states(sequence: fx.Node, module: nn.RNNBase) -> list[fx.Node]:
    """Of each direction the state of the last layer at the last step that it did."""
    steps = -2 if module.batch_first else 0
    at = lambda step: sequence.graph.call_method("select", (sequence, steps, step))
    if not module.bidirectional:
        return [at(-1)]
    width = module.proj_size or module.hidden_size
    part = lambda state, begin: sequence.graph.call_method("narrow", (state, -1, begin, width))
    return [part(at(-1), 0), part(at(0), width)]


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
