"""Save a model to one file: its graph by operator names, its tensors raw."""

from __future__ import annotations

import contextlib
import operator
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from ..errors import InputError, is_out_of_memory
from ..graph import capture
from ..graph.modules.layers import assert_keys, assert_length, assert_sizes, assert_value
from ..graph.modules.leaves import runs_hooks
from ..graph.nodes.counts import counts_of, with_counts
from ..graph.nodes.flat import NotFlat, is_nested, spelled
from ..graph.nodes.results import contents_of
from ..graph.tracing.captured import renamed
from ..graph.tracing.sized import capture_sized
from ..machine.host_memory import unread
from ..models.kinds import rewritable
from ..optimized import Optimized, PlanRecipe, describe
from ..verify import observe, verify
from ..verify.inputs import random_inputs
from .container import write
from .examples import examples_in
from .layers import OWN_CODE
from .loading import EXAMPLES, drawn, path_of, versions
from .plain import refusal
from .serial import dump, restore

_GUARDS = "_guards_fn"
"""The part by which what torch.export made checks its arguments: a trace goes into it."""


def save(model: nn.Module, path: str | Path) -> None:
    """Write `model` to one file: its graph by operator names, its tensors raw, nothing pickled.

    >>> import tempfile, nhwc
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    >>> x = torch.rand(1, 3, 16, 16)
    >>> with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    ...     save(net, Path(folder, "net.nhwc"))
    ...     torch.allclose(nhwc.load(Path(folder, "net.nhwc"))(x), net(x), atol=1e-5)
    True

    Any model that can be captured whole can be saved, and so can those that `optimize` and `fuse`
    return. If only a graph for the shapes of the example could be captured, the file holds that one
    and the loaded model refuses other shapes, and autocast. A dict of a class of your own, like the
    outputs of transformers, comes back from the file as a plain one, a dataclass as a dict of its
    fields, a named tuple as a tuple. The choice of kernels is not saved: it holds for one machine
    only.
    """
    path = path_of(path, "save(model, 'model.nhwc')")
    recipes: tuple[PlanRecipe, ...] = ()
    examples: tuple[tuple[str, ...], ...] = ()
    exact = False
    model = rewritable(model, "save")
    if isinstance(model, Optimized):
        recipes, examples, exact = model.recipes, model.examples, model.exact
        _check_called(model)
        model = model.portable
    if isinstance(model, fx.GraphModule):
        _check_called(model)
    if not isinstance(model, fx.GraphModule) or hasattr(model, _GUARDS):
        model = _captured(model, examples)
    graph = model
    planned = [list(recipe.inputs) for recipe in recipes if _is_readable(recipe.inputs)]
    if len(planned) > EXAMPLES:
        raise InputError(
            f"the model is optimized for {len(planned)} sets of shapes; a file names up to "
            f"{EXAMPLES}. Optimize it for fewer."
        )
    try:
        header, tensors = dump(_with_plain_results(graph))
    except InputError as error:
        sized, inputs = _for_sizes(graph, examples, recipes, error)
        header, tensors = dump(_with_plain_results(sized))
        planned = [list(describe(inputs, counts_of(sized.graph))) for _ in planned]
    _check_readable(header, tensors)
    header |= {"planned": planned, "exact": exact, "written_with": versions()}
    write(path, header, tensors)
    unread(tensors)


def _check_called(model: nn.Module) -> None:
    """Refuse what hangs on the model itself, which no graph of it has."""
    if runs_hooks(model):
        raise refusal("the whole", f"it has {OWN_CODE}")


def _captured(model: nn.Module, examples: Sequence[tuple[str, ...]]) -> fx.GraphModule:
    """`model` as a graph that takes what the examples give, in words, for optional arguments."""
    calls = [drawn(map(examples_in, one)) for one in examples if _is_readable(one)]
    return capture(model, calls).module


def _with_plain_results(graph: fx.GraphModule) -> fx.GraphModule:
    """A graph without the user's kinds of dicts and tuples: a file holds no code of theirs."""
    made = any(_contents(node) is not None for node in graph.graph.nodes)
    if not made and not _is_named(graph.graph.output_node().args):
        return graph
    result = fx.GraphModule(graph, renamed(graph.graph), graph._get_name())
    for node in list(result.graph.nodes):
        contents = _contents(node)
        if contents is None:
            continue
        for user in list(node.users):
            held: dict[fx.Node, Any] = {n: n for n in user.all_input_nodes}
            held[node] = contents
            user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), held.__getitem__)
        result.graph.erase_node(node)
    output = result.graph.output_node()
    output.args = _plain(output.args)
    result.recompile()
    return result


def _contents(node: fx.Node) -> dict[str, Any] | tuple[Any, ...] | None:
    """What lies in a dict, a dataclass or a named tuple of the user's; None for other nodes."""
    return None if node.target in (OrderedDict, torch.Size) else contents_of(node)


def _is_named(value: Any) -> bool:
    """Whether it is a named tuple, or has one inside."""
    items = value.values() if isinstance(value, dict) else value
    inside = isinstance(value, (dict, list, tuple)) and any(map(_is_named, items))
    return inside or (isinstance(value, tuple) and hasattr(value, "_fields"))


def _plain(value: Any) -> Any:
    """`value` with a plain tuple for each named one."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(_plain, value))
    return value


def _check_readable(header: dict[str, Any], tensors: list[Tensor]) -> None:
    """Refuse to write what `load` would refuse to read."""
    try:
        restore(header, tensors)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"the model cannot be saved: it has {error}. Name or write that part another way, or "
            "keep the model as code and weights."
        ) from error


def _for_sizes(
    graph: fx.GraphModule,
    examples: Sequence[tuple[str, ...]],
    recipes: Sequence[PlanRecipe],
    error: InputError,
) -> tuple[fx.GraphModule, Sequence[Any]]:
    """The graph for the sizes of the only example, and that; it checks what it is given.

    Raises `error` without one.
    """
    if not examples:
        raise InputError(f"{error} If it decides by sizes alone, save what nhwc.optimize returns.")
    made = next((recipe.graph for recipe in recipes if recipe.graph is not None), None)
    try:
        said = [*map(examples_in, examples[0])]
        inputs = drawn(said)
        sized = made or capture_sized(graph, inputs)[0]
    except Exception as why:
        if is_out_of_memory(why):
            raise
        raise error from None
    if not all(said[place].numbers for place in counts_of(sized.graph)):
        raise error  # What the texts do not say was drawn here: nobody gave it.
    if made is None and not _answers_as(sized, graph, inputs):
        raise InputError(
            "the model cannot be saved: a graph for the sizes of its example answers otherwise "
            "than its code does. Keep the model as code and weights."
        )
    if len(examples) > 1:
        raise InputError(
            f"the model is optimized for {len(examples)} sets of shapes, each in a graph of its "
            "own; a file holds one. Optimize the model for one set of shapes and save that."
        )
    in_order = not _takes_any_order(sized, graph, inputs)
    into = [str(place.target) for place in sized.graph.find_nodes(op="placeholder")][: len(inputs)]
    if in_order and into[-1].startswith("**"):
        raise InputError(
            "the model cannot be saved: its answer depends on the order in which it is given "
            "arguments by name, which no file can see. Let it take them in a dict."
        )
    try:
        result, given = spelled(sized, inputs)
    except NotFlat as why:
        raise InputError(f"the model cannot be saved: {why}.") from error
    places = result.graph.find_nodes(op="placeholder")
    declared = graph.graph.find_nodes(op="placeholder")
    declared = [one for one in declared if not str(one.target).startswith("*")]
    _put_defaults(places[: len(given)], declared)
    left_out = _left_out(places[-1], declared[len(places) :])
    values = [*given, *(one.args[0] for one in left_out)]
    with result.graph.inserting_before([*places, *left_out][-1].next):
        for node, one in zip([*places[: len(given)], *left_out], values, strict=True):
            _check_given(result.graph, node, one, in_order=in_order)
    return result, given


def _answers_as(sized: fx.GraphModule, graph: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether both answer alike, also to whole numbers that are one: masks of nothing hide much."""

    def one_like(value: Tensor) -> Tensor:
        return value if value.is_floating_point() else torch.ones_like(value)

    truths = [observe(graph, [tuple(inputs)], wide=False)]
    with contextlib.suppress(Exception):  # A table may end before its second row.
        ones = tree_map_only(Tensor, one_like, tuple(inputs))
        truths.append(observe(graph, [with_counts(sized.graph, inputs, ones)], wide=False))
    return all(verify(truth, sized).passed for truth in truths)


def _takes_any_order(sized: fx.GraphModule, graph: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether `sized` answers as `graph` if each dict of inputs comes the other way round."""
    if not any(map(_is_dict, tree_leaves(inputs, _is_dict))):
        return True
    try:
        # Tensors of one shape are drawn alike; others tell whose place one has taken.
        return _answers_as(sized, graph, random_inputs(_turned(inputs), 2)[1])
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return False  # The model's code refuses the other order.


def _turned(given: Any) -> Any:
    """What is given, each dict in it with its keys in the opposite order."""

    def turn(one: Any) -> Any:
        if not _is_dict(one):
            return one
        return type(one)((key, _turned(one[key])) for key in reversed(one))

    return tree_map(turn, given, is_leaf=_is_dict)


def _is_dict(value: object) -> bool:
    return type(value) in (dict, OrderedDict)


def _put_defaults(places: Sequence[fx.Node], declared: Sequence[fx.Node]) -> None:
    """Let arguments be left out as the model declares it, if only to be told that they may not."""
    optional = False
    for number, place in enumerate(places):
        default = declared[number].args if number < len(declared) else (None,)
        optional = optional or bool(default)
        # Python wants one for each argument behind one that has it.
        place.args = default or ((None,) if optional else ())


def _left_out(last: fx.Node, declared: Sequence[fx.Node]) -> list[fx.Node]:
    """New arguments behind `last` for those that no call gave, which may be given as they are."""
    found = []
    for one in declared:
        if not one.args or type(one.args[0]) not in (bool, int, float, str, type(None)):
            break
        with last.graph.inserting_after(last):
            last = last.graph.placeholder(str(one.target), default_value=one.args[0])
        found.append(last)
    return found


def _check_given(graph: fx.Graph, node: fx.Node, given: Any, *, in_order: bool) -> None:
    """Let the graph check that it is given what it was made for; a dict also `in_order`, or not."""
    if isinstance(given, Tensor):
        checked = graph.call_function(assert_sizes, (node, list(given.shape), given.dtype))
        if node.op == "placeholder" and node.args:  # TorchScript has to see that it is not None.
            node.replace_all_uses_with(checked, lambda user: user is not checked)
    elif is_nested(given):
        keyed = isinstance(given, dict)
        ordered = keyed and in_order
        check, held = (assert_keys, [*given]) if ordered else (assert_length, len(given))
        graph.call_function(check, (node, held))
        for key, item in given.items() if keyed else enumerate(given):
            part = graph.call_function(operator.getitem, (node, key))
            _check_given(graph, part, item, in_order=in_order)
    else:
        graph.call_function(assert_value, (node, given))


def _is_readable(texts: Sequence[str]) -> bool:
    """Whether the texts of inputs say all of them: an infinite number or a class has no text."""
    try:
        return bool([*map(examples_in, texts)])
    except Exception:
        return False
