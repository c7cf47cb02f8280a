"""The reasons why a batch norm, or the layer beside it, must not be folded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from ..graph import module_of, user_path
from ..graph.modules import folded
from ..graph.modules.layers import StatisticsNorm
from ..graph.modules.leaves import (
    computes_as,
    definer,
    is_frozen_batch_norm,
    is_set_from_outside,
    opaque_by_nature,
)
from ..graph.nodes.memory import overwritten

_READS_SHAPE = {"shape", "ndim", "dtype", "device", "size", "dim", "numel"}


def is_batch_norm(module: nn.Module | None) -> bool:
    return isinstance(module, _BatchNorm) or (module is not None and is_frozen_batch_norm(module))


def name_of(node: fx.Node) -> str:
    """Name a node for the report: by the module's path, or the function and its module's path."""
    if node.op in ("call_module", "get_attr", "placeholder"):
        owner = node.graph.owning_module
        return str(node.target) if owner is None else user_path(owner, str(node.target))
    function = getattr(node.target, "__name__", str(node.target))
    path = path_around(node)
    return f"{path}.{function}()" if path else f"{function}()"


def path_around(node: fx.Node) -> str:
    """The path of the module whose code made `node`; empty for the model itself."""
    stack = node.meta.get("nn_module_stack")
    return str(next(reversed(stack.values()))[0]) if stack else ""


def input_of(node: fx.Node) -> fx.Node | None:
    """Return the first value that a layer is called with."""
    values = [*node.args, *node.kwargs.values()]
    return values[0] if values and isinstance(values[0], fx.Node) else None


def rows_around(norm: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Find the `flatten` of a linear layer's result into rows for `norm`, and the reshape back.

    The result is None if anything else reads the rows.
    """
    flat = input_of(norm)
    if flat is None or flat.target != "flatten" or flat.args[1:] != (0, 1) or len(flat.users) > 1:
        return None
    again = next(iter(norm.users)) if len(norm.users) == 1 else None
    linear = flat.args[0]
    if again is None or again.target != "reshape_as" or again.args != (norm, linear):
        return None
    return (flat, again) if computes_as(module_of(linear), nn.Linear) else None


def written_between(values: Iterable[object], first: fx.Node, last: fx.Node) -> str:
    """Say what writes into one of `values` behind `first`, up to `last`; empty if nothing does."""
    nodes = [value for value in values if isinstance(value, fx.Node)]
    writer = overwritten(nodes, first, last)
    return "" if writer is None else f"{name_of(writer)} writes in place before it is read"


def readers(node: fx.Node) -> list[fx.Node]:
    """Return the users of `node` that read its values, not only its shape."""
    return [user for user in node.users if not _asks_shape(user)]


def _asks_shape(node: fx.Node) -> bool:
    if node.op == "call_function" and node.target is getattr:
        return node.args[1] in _READS_SHAPE
    return node.op == "call_method" and node.target in _READS_SHAPE


def calls_of(node: fx.Node) -> list[fx.Node]:
    """Return every call of the module that `node` calls; each module has one path in a graph."""
    return list(node.graph.find_nodes(op="call_module", target=node.target))


def norm_unfit(norm: nn.Module) -> str | None:
    """Say why the result of this batch norm is not a fixed scale and shift; None if it is."""
    fields: Any = norm
    if opaque_by_nature(norm):
        return "the batch norm has hooks"
    if is_frozen_batch_norm(norm):
        return None
    known = _of_torch(norm) or type(norm) is StatisticsNorm
    if is_set_from_outside(norm) or not known:
        return f"{type(norm).__name__} has a forward of its own"
    if fields.running_mean is None or fields.running_var is None:
        return "the batch norm keeps no running statistics: it normalises by those of each batch"
    if norm.training:
        return "the batch norm is in training mode: call model.eval() first"
    if is_parametrized(norm):
        return "a parameter of the batch norm is parametrized"
    return None


def layer_unfit(layer: nn.Module) -> str | None:
    """Say why nothing may be folded into the weights of this layer; None if it may."""
    fields: Any = layer
    if is_parametrized(layer):
        return (
            "its weight is computed by a parametrization: bake it in with "
            "torch.nn.utils.parametrize.remove_parametrizations first"
        )
    if opaque_by_nature(layer):
        return "it has hooks"
    if is_set_from_outside(layer) or not _of_torch(layer):
        return f"{type(layer).__name__} has a forward of its own"
    if fields.weight is not None and not fields.weight.dtype.is_floating_point:
        return f"its weight is {fields.weight.dtype}"
    return None


def folded_before(layer: nn.Module) -> str | None:
    """Refuse a layer that holds a fold which it can undo: it could not undo a second one."""
    if isinstance(layer, folded.FOLDED):
        return "it holds a batch norm already, which it could not take out any more"
    return None


def called_again(node: fx.Node) -> str | None:
    """Refuse a module that is called elsewhere too: the fold would be wrong for those inputs."""
    count = len(calls_of(node))
    return f"{name_of(node)} is called at {count} sites" if count > 1 else None


def weight_read_elsewhere(node: fx.Node) -> str | None:
    """Refuse a layer whose weight or bias the graph also reads by itself."""
    for other in node.graph.find_nodes(op="get_attr"):
        if str(other.target).startswith(f"{node.target}."):
            return f"its {str(other.target).rpartition('.')[2]} is also read by itself"
    return None


def pads_zeros(conv: Any) -> bool:
    """Whether a convolution sees zeros beside what it is given."""
    if conv.padding_mode != "zeros" or conv.padding == "valid":
        return False
    if conv.padding == "same":
        return any(size > 1 for size in conv.kernel_size)
    return any(side > 0 for side in conv.padding)


def owners_of(gm: fx.GraphModule) -> dict[Tensor, list[str]]:
    """Map each tied parameter, one with several owners, to the paths of its owners."""
    owners: dict[Tensor, list[str]] = {}
    for name, parameter in gm.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, []).append(name.rpartition(".")[0])
    # The map must not keep weights with a single owner alive: folding frees them.
    return {parameter: names for parameter, names in owners.items() if len(names) > 1}


def tied_note(node: fx.Node, owners: dict[Tensor, list[str]]) -> str:
    """Return a note for the report if the weight was tied to another module's."""
    module: Any = module_of(node)
    others = [name for name in owners.get(module.weight, []) if name != node.target]
    return f"its weight was tied to {others[0]}'s; folded, it has its own" if others else ""


def _of_torch(module: nn.Module) -> bool:
    home = definer(type(module), "forward").__module__
    known = home.startswith("torch.nn.modules.") or home == folded.__name__
    return known and not isinstance(module, torch.jit.ScriptModule)
