"""Compute only those tokens that are read.

x = x + attention(norm(x))              x = x[:, :1] + attention(norm(x), the first query alone)
x = x + mlp(norm(x))              ->    x = x + mlp(norm(x))
y = head(norm(x)[:, 0])                 y = head(norm(x)[:, 0])

A vision transformer answers from its class token. What the others become in the last block, behind
the keys and values that the class token asks, nobody reads.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import fx, nn

from ..graph import module_of, replace_module, written_into
from ..graph.modules.leaves import computes_as, unlike_class
from ..graph.modules.mended import Attention, SpelledAttention
from ..graph.nodes.memory import exposed
from ..graph.nodes.ranks import asks_rank, ranks_of
from ..graph.nodes.seen import note_side, shape_at
from ..graph.report import PassReport, Site
from ..operators.kinds import is_pointwise, torchs_name
from ._folding_sites import name_of
from ._matching import activation_of
from ._reporting import reported

_PLAIN = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False}
_WORTHWHILE = (nn.Linear, Attention, SpelledAttention)

_Ranks = Mapping[fx.Node, int | None]
_Places = dict[fx.Node, int]
"""Values, and the dimension of each that counts its tokens, from the last: -2 in rows."""


class _Narrowed(NamedTuple):
    """The dimension of a result that counts its tokens, and the inputs that need no more either."""

    place: int
    inputs: _Places


def narrow_tokens(gm: fx.GraphModule) -> PassReport:
    """Let the layers before `x[:, 0]` compute the first tokens alone, if nobody reads the others.

    A result of the model that lies in such a slice keeps the strides that it has.
    """
    ranks, held = ranks_of(gm.graph, sure=True), exposed(gm.graph)
    sites = []
    for node in reversed(list(gm.graph.nodes)):
        count = 0 if ranks[node] != 3 else _read_of(node, held)
        narrowed = _narrowed(node, ranks) if count else {}
        if any(isinstance(module_of(one), _WORTHWHILE) for one in narrowed):
            sites.append(Site(name_of(node), f"the first {count} of its tokens", True))
            _narrow(narrowed, count)
    return reported(gm, "narrow_tokens", sites)


def _read_of(node: fx.Node, held: set[fx.Node]) -> int:
    """How many of the first tokens of (batch, tokens, channels) are read; 0 if others may be."""
    picks = [user for user in node.users if not asks_rank(user)]
    ends = [0 if pick in held else _end_of(pick, node) for pick in picks]
    return max(ends) if ends and all(ends) else 0


def _end_of(pick: fx.Node, node: fx.Node) -> int:
    """The place behind the last token that `x[:, 0]` or `x[:, :2]` reads; 0 if it is no such."""
    if pick.target is not operator.getitem or pick.args[0] is not node:
        return 0
    key: Any = pick.args[1]
    if not isinstance(key, tuple) or any(one != slice(None) for one in key[::2]):
        return 0
    wanted = key[1] if len(key) in (2, 3) else None
    if type(wanted) is int:
        return max(0, wanted + 1)
    if not isinstance(wanted, slice):
        return 0
    first, end = wanted.start or 0, wanted.stop
    return end if type(first) is type(end) is int and 0 <= first < end else 0


def _narrowed(last: fx.Node, ranks: _Ranks) -> dict[fx.Node, _Narrowed]:
    """All that need not compute more tokens than are read of `last`.

    An input of theirs that is not among them is read by others, too.
    """
    found: dict[fx.Node, _Narrowed] = {}
    node = last
    while node.op != "root":
        readers = [user for user in node.users if not asks_rank(user)]
        places = {found[one].inputs.get(node) if one in found else None for one in readers}
        place = -2 if node is last else places.pop() if len(places) == 1 else None
        inputs = None if place is None else _inputs(node, place, ranks)
        if place is not None and inputs is not None:
            found[node] = _Narrowed(place, inputs)
        node = node.prev
    return found


def _inputs(node: fx.Node, place: int, ranks: _Ranks) -> _Places | None:
    """The inputs of `node` that it needs no more tokens of than are asked of it; None if it is no
    layer that computes each token apart from the others.
    """
    module = module_of(node)
    if written_into(node) is not None or (module is not None and unlike_class(module)):
        return None
    if activation_of(node) is not None or (place < -1 and _is_rowwise(module)):
        return dict.fromkeys(node.all_input_nodes, place)
    if module is not None or node.target is F.scaled_dot_product_attention:
        return _queries(node, module) if place == -2 else None
    if node.op not in ("call_function", "call_method"):
        return None
    if node.target == "transpose":
        return _of_heads(node, place)
    name = torchs_name(node.target)
    if name == "contiguous":
        return {node.all_input_nodes[0]: place}
    if name in ("reshape", "view", "flatten"):
        return _of_rows(node, place)
    operands = node.all_input_nodes
    if not is_pointwise(name) or None in {ranks[one] for one in operands}:
        return None
    return {one: place for one in operands if (ranks[one] or 0) >= -place}


def _is_rowwise(module: Any) -> bool:
    """Whether it computes each row of channels apart from the others."""
    norm = computes_as(module, nn.LayerNorm) or computes_as(module, nn.RMSNorm)
    return computes_as(module, nn.Linear) or (norm and len(module.normalized_shape) == 1)


def _queries(node: fx.Node, module: nn.Module | None) -> _Places | None:
    """The queries of attention, which needs all keys and values."""
    if isinstance(module, Attention):
        return {} if module.batch_first and module.first is None else None
    if module is not None and not isinstance(module, SpelledAttention):
        return None
    plain = len(node.args) == 3 and all(
        name == "scale" or _PLAIN.get(name, 0) == value for name, value in node.kwargs.items()
    )
    query, *others = node.args or (None,)
    return {query: -2} if plain and isinstance(query, fx.Node) and query not in others else None


def _of_heads(node: fx.Node, place: int) -> _Places | None:
    """The tokens of (batch, heads, tokens, channels) that were brought before the heads."""
    source, *dims = node.args or (None,)
    known = isinstance(source, fx.Node) and len(shape_at(source) or ()) == 4
    if not isinstance(source, fx.Node) or not known or place != -3:
        return None
    return {source: -2} if sorted(map(str, dims)) == ["1", "2"] else None


def _of_rows(node: fx.Node, place: int) -> _Places | None:
    """The tokens of (batch, tokens, heads, channels) whose heads are put side by side."""
    source = node.all_input_nodes[0]
    before, after = shape_at(source) or (), shape_at(node) or ()
    joined = len(before) == 4 and len(after) == 3 and before[:2] == after[:2]
    return {source: -3} if joined and place == -2 and node.op == "call_method" else None


def _narrow(narrowed: Mapping[fx.Node, _Narrowed], count: int) -> None:
    """Let the nodes compute `count` tokens, from slices of what others read as a whole."""
    slices: dict[fx.Node, fx.Node] = {}
    for node in sorted(narrowed):
        for source, place in narrowed[node].inputs.items():
            if source not in narrowed and source not in slices:
                key: Any = (..., slice(None, count), *[slice(None)] * (-1 - place))
                with node.graph.inserting_before(node):
                    slices[source] = node.graph.call_function(operator.getitem, (source, key))
                _note(slices[source], source, place, count)
            if source in slices:
                node.replace_input_with(source, slices[source])
        _note(node, node, narrowed[node].place, count)
        module = module_of(node)
        if isinstance(module, Attention):
            replace_module(node, Attention(module.heads, first=count))
        elif node.target in ("reshape", "view"):
            node.target, node.args, node.kwargs = "flatten", (node.all_input_nodes[0], 2), {}


def _note(node: fx.Node, like: fx.Node, place: int, count: int) -> None:
    """Note that `node` gives what `like` gave, but of so many tokens."""
    shape = shape_at(like)
    if shape:
        note_side(node, like, place, min(shape[place], count))
