"""Turn a write into a part or a view of a fresh tensor into a new tensor.

`bias = bias.clone(); bias[n:].zero_()`, as Swin's second version has it, writes into memory that
two nodes share: a plan, which gives each value a place of its own, could not have it, and what
follows from parameters alone could not be computed beforehand. The same said without a write is
`slice_scatter`, which `x[key] = value` is already.

`q = q.transpose(1, 2); q.mul_(scale)` writes into a view of all of it, and is `q * scale` where
nothing reads the other views any more. So is a write into a value that others have read before.

`x.div_(255)` writes into the input, which the caller sees: a copy of it is written into, and put
back into the input when all else is done. The input of a part is no input once the part stands in
a graph of the whole: there, no copy is made any more.
"""

from __future__ import annotations

import copy
import inspect
import operator
from itertools import pairwise
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import fx

from ..graph import (
    clean,
    module_of,
    puts_back,
    replace_module,
    result_may_be_view,
    written_and_returned,
    written_into,
)
from ..graph.modules.layers import assert_none
from ..graph.nodes.memory import seen_later, sharing
from ..graph.nodes.results import is_returned
from ..graph.nodes.shapes import is_size
from ..graph.report import PassReport, Site
from ..graph.tracing.assigned import assigned
from ..operators.kinds import returns_several
from ._folding_sites import name_of
from ._reporting import reported


def mend_writes(gm: fx.GraphModule) -> PassReport:
    """Replace methods such as `zero_` of slices, and `mul_` of views, that nothing else reads.

    What writes into the input writes into a copy, which is put back at the end.
    """
    sites = [*_without_copies(gm), *_put_back(gm), *_parts_anew(gm), *write_anew(gm)]
    return reported(gm, "mend_writes", sites)


def assign_anew(gm: fx.GraphModule) -> None:
    """Make a new tensor of what is written into a part, also if that is said as `x[key] = value`.

    A trace of ours has new tensors for these; a graph that Dynamo made has the writes.

    >>> graph = fx.Graph()
    >>> y = graph.call_method("exp", (graph.placeholder("x"),))
    >>> write, _ = graph.call_function(operator.setitem, (y, slice(2), 0)), graph.output(y)
    >>> assign_anew(gm := fx.GraphModule({}, graph))
    >>> [node.name for node in gm.graph.nodes]
    ['x', 'exp', 'getitem', 'full_like', 'slice_scatter', 'output']
    """
    for node in gm.graph.find_nodes(op="call_function", target=operator.setitem):
        whole, key, value = node.args
        if not _is_memory_of_its_own(whole) or seen_later(node, besides=whole):
            continue
        try:
            made = _put(gm, node, whole, key, value)
        except fx.proxy.TraceError:
            continue
        _read_instead(gm, node, whole, made)
        _compute_anew(node, whole, key, value)
        gm.graph.erase_node(node)
    _parts_anew(gm)


_ANEW: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
}


def _compute_anew(node: fx.Node, whole: Any, key: Any, value: Any) -> None:
    """Let `x[key] *= 2` compute a product; it multiplies in place, and assigns it to that place."""
    part = written_into(value) if isinstance(value, fx.Node) else None
    if not isinstance(part, fx.Node) or part.target is not operator.getitem:
        return
    if part.args == (whole, key) and [*part.users] == [value] and value.target in _ANEW:
        value.target = _ANEW[value.target]


def _parts_anew(gm: fx.GraphModule) -> list[Site]:
    """Make a new tensor of what a method such as `zero_` writes into a part of."""
    sites = []
    for node in list(gm.graph.nodes):
        part = written_into(node)
        if node.op != "call_method" or getattr(part, "target", None) is not operator.getitem:
            continue
        reason = _unfit(gm, node, part)
        sites.append(Site(name_of(node), str(node.target), not reason, reason))
        if not reason:
            _replace(gm, node, part)
    return sites


def write_anew(gm: fx.GraphModule) -> list[Site]:
    """Make a new tensor of what is written into one that others have read, or into a view.

    >>> gm = fx.symbolic_trace(lambda x: (y := x.exp()).sum() + y.relu_())
    >>> [site.what for site in write_anew(gm)], [str(node) for node in gm.graph.nodes]
    (['relu'], ['x', 'exp', 'sum_1', 'relu_', 'add', 'output'])
    """
    sites = []
    for node in list(gm.graph.nodes):
        value = written_into(node)
        if not isinstance(value, fx.Node) or not value.op.startswith("call"):
            continue
        read = any(user is not node and not is_size(user) for user in value.users)
        if (
            (read or result_may_be_view(value))
            and not seen_later(node)
            and _made_anew(gm, node, value)
        ):
            sites.append(
                Site(name_of(node), str(getattr(node.target, "__name__", node.target)), True)
            )
    return sites


def _made_anew(gm: fx.GraphModule, node: fx.Node, value: fx.Node) -> bool:
    """Let `node` return what it writes without writing it; whether that was possible."""
    layer = module_of(node)
    if layer is not None:
        layer = copy.copy(layer)
        layer.inplace = False  # type: ignore[assignment]
        replace_module(node, layer)
        return True
    if node.op == "call_function":
        return _called_without_write(node)
    if node.target in _PLACING:
        # Without a write, most of them lose channels last; a copy has the strides of the value.
        with gm.graph.inserting_before(node):
            node.update_arg(0, gm.graph.call_method("clone", (value,)))
        return True
    if _keeps_type(node):
        node.target = _without_write(node)
        return True
    if node.target not in _OF_ITS_SHAPE:
        return False
    node.replace_all_uses_with(_assigned(gm, node, value, ())[1])
    gm.graph.erase_node(node)
    return True


def _called_without_write(node: fx.Node) -> bool:
    """As `_made_anew`, for `F.relu(x, inplace=True)` and for `torch.relu_(x)`."""
    function: Any = node.target
    if node.kwargs.get("out") is not None:
        return False
    if getattr(function, "__module__", "") == F.__name__:
        given = inspect.signature(function).bind(*node.args, **node.kwargs).arguments
        given.pop("inplace", None)
        node.args, node.kwargs = (given.pop("input"),), given
        return True
    name = str(getattr(function, "__name__", ""))
    home = next((one for one in (F, torch) if getattr(one, name, None) is function), None)
    if name not in _COMPUTING or home is None:
        return False
    node.target = getattr(home, name.removesuffix("_"))
    return True


def _put_back(gm: fx.GraphModule) -> list[Site]:
    """Write into a copy of the input instead, and put it back at the end."""
    [output] = gm.graph.find_nodes(op="output")
    given = [node for node in gm.graph.find_nodes(op="placeholder") if not _is_fixed(node)]
    alike = sharing(given[0]) if given else []
    writes = [node for node in alike if written_into(node) is not None]
    if all(puts_back(node) or written_into(node) not in given for node in writes):
        return []
    reason = "two inputs may share memory" if len(given) > 1 else _shown(gm, alike, writes)
    if not reason:
        with gm.graph.inserting_before(writes[0]):
            copied = gm.graph.call_method("clone", (given[0],))
        writes[0].replace_input_with(given[0], copied)
        order = {node: place for place, node in enumerate(gm.graph.nodes)}
        for before, write in pairwise((given[0], *writes)):
            for user in [user for user in before.users if order[user] > order[write]]:
                user.replace_input_with(before, write)
        with gm.graph.inserting_before(output):
            gm.graph.call_method("copy_", (given[0], writes[-1]))
        clean(gm)
    return [Site(name_of(node), str(node.target), not reason, reason) for node in writes]


def _without_copies(gm: fx.GraphModule) -> list[Site]:
    """Write into a value itself where a copy of it is written into, and put back at once."""
    sites = []
    for back in gm.graph.find_nodes(op="call_method", target="copy_"):
        value, *results = back.args
        copied: Any = results[0] if results else None
        while isinstance(copied, fx.Node) and copied.target != "clone":
            copied = written_and_returned(copied)
        if not isinstance(copied, fx.Node) or copied.args != (value,) or copied.kwargs:
            continue
        if value.op == "placeholder" or _are_two(gm, value, copied, back):
            continue
        back.replace_all_uses_with(value if results[0] is copied else results[0])
        copied.replace_all_uses_with(value)
        for node in (back, copied):
            gm.graph.erase_node(node)
        sites.append(Site(name_of(back), "copy_", True))
    return sites


def _are_two(gm: fx.GraphModule, value: fx.Node, copied: fx.Node, back: fx.Node) -> bool:
    """Whether it shows that a value and its copy, which is put back, are two tensors."""
    between, after = _later(gm, copied) & _earlier(gm, back), _later(gm, back)
    of_value, of_copy = sharing(value), sharing(copied)
    return (
        any(between & one.users.keys() for one in of_value)
        or any(map(is_returned, of_copy))
        or any(written_into(one) is not None for one in (*of_value, *of_copy) if one in after)
    )


def _is_fixed(argument: fx.Node) -> bool:
    """Whether the graph does no more with it than to check what it is fixed to."""
    return all(
        user.target is assert_none
        or (user.target is operator.eq and all(one.target is torch._assert for one in user.users))
        for user in argument.users
    )


def _shown(gm: fx.GraphModule, alike: list[fx.Node], writes: list[fx.Node]) -> str:
    """Why it shows when a write into the input goes elsewhere; empty if it does not.

    `alike` are the input and all that may lie in its memory, `writes` those that write there.
    """
    order = {node: place for place, node in enumerate(gm.graph.nodes)}
    whole = [alike[0], *writes]
    if any(write.target in _RESHAPING for write in writes):
        return "it changes the shape of the input"
    if any(map(is_returned, alike)):
        return "the input is returned, or a view of it"
    if any(written_into(write) not in whole for write in writes):
        return "it writes into a view of the input"
    if None in map(written_and_returned, writes):
        return "a write returns something else"
    last = {one: max(map(order.__getitem__, one.users)) for one in alike if one.users}
    views = [one for one in last if one not in whole]
    if any(order[one] < order[write] < last[one] for one in views for write in writes):
        return "a view of the input is read again"
    return ""


_RESHAPING = {
    *("unsqueeze_", "squeeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "resize_"),
    *("resize_as_", "set_", "as_strided_"),
}

_COMPUTING = {
    *("add_", "sub_", "mul_", "div_", "pow_", "clamp_", "clamp_min_", "clamp_max_", "neg_", "abs_"),
    *("exp_", "log_", "sqrt_", "rsqrt_", "relu_", "sigmoid_", "tanh_"),
    *("leaky_relu_", "elu_", "celu_", "selu_", "hardtanh_", "threshold_"),
}
_PLACING = {"index_add_", "index_copy_", "index_fill_", "masked_fill_", "scatter_", "scatter_add_"}
"""Their results have the type of what they write into without a write, too: `gt_` has booleans."""

_ASSIGNING = {"zero_", "fill_", "copy_"}
"""They do what `part[...] = value` does."""

_OF_ITS_SHAPE = {
    *(*_COMPUTING, *_PLACING, *_ASSIGNING),
    *("gt_", "ge_", "lt_", "le_", "eq_", "ne_", "floor_", "ceil_", "round_", "trunc_", "cumsum_"),
}
"""Methods without which a part can be had by assigning: `squeeze_` changes what it is called on."""


def _keeps_type(node: fx.Node) -> bool:
    """Whether the same without a write has the type and shape of what is written into."""
    numbers = not node.kwargs and all(type(value) in (int, float) for value in node.args[1:])
    return node.target in _PLACING or (numbers and node.target in _COMPUTING)


def _unfit(gm: fx.GraphModule, node: fx.Node, part: fx.Node) -> str:
    """Why the write cannot become a new tensor; empty if it can."""
    whole = part.args[0]
    if part.target is operator.getitem and not _keeps_memory(part.args[1]):
        return "an index that is no slice makes a copy, or a dimension more"
    if [*part.users] != [node]:
        return "what it writes into is read by others"
    if node.users and node.target not in _COMPUTING | _PLACING:
        return "what it returns is read"
    if any(written_into(user) is not None or result_may_be_view(user) for user in node.users):
        return "what it returns may be written into"
    if not _is_memory_of_its_own(whole):
        return "what it writes into may be a part of another tensor"
    if isinstance(part.args[1], int) and _may_be_several(whole):
        return "what it writes into may be one of several results"
    if node.target not in _OF_ITS_SHAPE:
        return "nothing else computes the same"
    if seen_later(node, besides=whole):
        return "another name of the same memory is read again"
    alike = sharing(whole) if node.users else []
    if any(written_into(one) in alike for one in _later(gm, node)):
        return "what it returns may be written into"
    return ""


def _is_memory_of_its_own(whole: Any) -> TypeGuard[fx.Node]:
    """Whether it is a tensor that the graph makes, and no part of another."""
    made = isinstance(whole, fx.Node) and whole.op.startswith("call")
    return made and not result_may_be_view(whole)


def _keeps_memory(key: Any) -> bool:
    """Whether an index gives a part: tensors, lists and booleans pick numbers, which are copied."""
    each = key if isinstance(key, tuple) else (key,)
    return all(
        isinstance(one, slice)
        or one is Ellipsis
        or type(one) is int
        or (isinstance(one, fx.Node) and is_size(one))
        for one in each
    )


def _may_be_several(node: fx.Node) -> bool:
    """Whether an index takes one of the results of `node`, and not a part of its only one."""
    return node.op == "call_module" or returns_several(node.target)


def _without_write(node: fx.Node) -> str:
    return str(node.target).removesuffix("_")


def _earlier(gm: fx.GraphModule, node: fx.Node) -> set[fx.Node]:
    nodes = list(gm.graph.nodes)
    return {*nodes[: nodes.index(node)]}


def _later(gm: fx.GraphModule, node: fx.Node) -> set[fx.Node]:
    return {*gm.graph.nodes} - _earlier(gm, node) - {node}


def _replace(gm: fx.GraphModule, node: fx.Node, part: fx.Node) -> None:
    whole, key = part.args
    assert isinstance(whole, fx.Node)
    value, made = _assigned(gm, node, whole, key)
    _read_instead(gm, node, whole, made)
    if node.users:
        node.replace_all_uses_with(value)
    gm.graph.erase_node(node)
    if not part.users:
        gm.graph.erase_node(part)


def _assigned(gm: fx.GraphModule, node: fx.Node, whole: fx.Node, key: Any) -> tuple[Any, fx.Node]:
    """What `node` writes, and `whole` with that at `key`."""
    if node.target in _ASSIGNING:
        given = node.kwargs.get("other", node.kwargs.get("value", 0))
        value: Any = node.args[1] if len(node.args) > 1 else given
    else:
        with gm.graph.inserting_before(node):
            value = gm.graph.call_method(_without_write(node), node.args, node.kwargs)
    return value, _put(gm, node, whole, key, value)


def _put(gm: fx.GraphModule, node: fx.Node, whole: fx.Node, key: Any, value: Any) -> fx.Node:
    """`whole` with `value` at `key`, made where `node` stands."""
    tracer = fx.proxy.GraphAppendingTracer(gm.graph)
    proxied: Any = lambda one: fx.Proxy(one, tracer)
    value = proxied(value) if isinstance(value, fx.Node) else value
    with gm.graph.inserting_before(node):
        return assigned(proxied(whole), fx.node.map_arg(key, proxied), value)


def _read_instead(gm: fx.GraphModule, node: fx.Node, whole: fx.Node, made: fx.Node) -> None:
    """Let what reads `whole` behind `node` read what was made of it."""
    earlier = _earlier(gm, node) | {node}
    for reader in [user for user in whole.users if user not in earlier]:
        reader.replace_input_with(whole, made)
