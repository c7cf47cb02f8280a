"""Compute now, once, every value that depends on parameters and buffers alone."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.conv import _ConvNd

from ..graph import attribute, called, clean, filled, fresh_name, module_of, targets_of
from ..graph.nodes.computed import is_computed_from_arguments
from ..graph.nodes.memory import exposed, memory_of
from ..graph.nodes.names import CONSTANT, is_made
from ..graph.report import PassReport, Site
from ..machine.host_memory import apart
from ._folding_sites import name_of

_MADE = (torch.full,)
"""It costs less to make these constants at each call than to keep them. They are not stored, but
what is computed from them is."""

_PRODUCTS = ("conv", "linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm")
"""How the names of functions begin that are given half precision under autocast, whatever comes."""

_MAY_CAST = (
    *(*_PRODUCTS, "einsum", "tensordot", "inner", "chain_", "multi_dot", "linalg_", "matrix_"),
    *("addbmm", "scaled_dot", "cov", "corrcoef", "prelu"),
)
"""How those begin that may return it."""


def fold_constants(gm: fx.GraphModule) -> PassReport:
    """Replace each computation on constants by its result, unless the graph writes into one."""
    constants: dict[fx.Node, None] = {}
    changing = exposed(gm.graph)
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            value = attribute(gm, str(node.target))
            constant = isinstance(value, Tensor) and not value.is_meta
        else:
            made = bool(node.all_input_nodes) or node.target in _MADE
            foldable = made and node not in changing and is_computed_from_arguments(node)
            constant = foldable and constants.keys() >= {*node.all_input_nodes}
        if constant:
            constants[node] = None
    written = next(filter(_writes_into_own, gm.graph.nodes), None)
    if written is not None:
        reason = f"{name_of(written)} writes into a parameter or buffer"
        return PassReport("fold_constants", (Site(name_of(written), "constants", False, reason),))
    kept = _kept_for_autocast(gm, constants)
    sites = _fold(gm, constants)
    if sites:
        for node in reversed(constants):
            if not node.users:
                gm.graph.erase_node(node)
        clean(gm)
    return PassReport("fold_constants", (*sites, *kept))


def _kept_for_autocast(gm: fx.GraphModule, constants: dict[fx.Node, None]) -> list[Site]:
    """Take those off `constants` that autocast would make of a type that their readers notice."""
    if not any(_called_name(node).startswith(_MAY_CAST) for node in constants):
        return []
    mode, sites = FakeTensorMode(), []
    without: dict[fx.Node, Any] = {}
    within: dict[fx.Node, Any] = {}
    kind = next((p.device.type for p in (*gm.parameters(), *gm.buffers())), "cpu")
    for node in constants:
        if node.op == "get_attr":
            without[node] = within[node] = mode.from_tensor(attribute(gm, str(node.target)))
            continue
        for enabled, values in ((False, without), (True, within)):
            half = torch.autocast(kind, torch.bfloat16, enabled=enabled)
            # Torch may be unable to tell the type without numbers.
            with contextlib.suppress(Exception), mode, half:
                values[node] = _evaluate(node, values)
    for node in reversed([node for node in constants if node in without]):
        types = [getattr(values.get(node), "dtype", None) for values in (without, within)]
        reader = next((user for user in node.users if not _takes_any(user, constants)), None)
        if types[0] is not types[1] and reader is not None:
            reason = f"autocast would make {types[1]} of it, and {name_of(reader)} reads it"
            sites.append(Site(name_of(node), "constant", False, reason))
            del constants[node]
    return sites


def _takes_any(reader: fx.Node, constants: Collection[fx.Node]) -> bool:
    """Whether `reader` gives the same type under autocast for operands of any."""
    if reader.op == "call_module":
        return isinstance(module_of(reader), _ConvNd | nn.Linear)
    return reader in constants or _called_name(reader).startswith(_PRODUCTS)


def _called_name(node: fx.Node) -> str:
    return "" if node.op == "get_attr" else str(getattr(node.target, "__name__", node.target))


def _fold(gm: fx.GraphModule, constants: dict[fx.Node, None]) -> list[Site]:
    """Compute `constants` in their order, and drop each value when nothing needs it any more."""
    sites = []
    values: dict[fx.Node, Any] = {}
    recast = _Recast()
    readers = {node: constants.keys() & node.users.keys() for node in constants}
    for node in constants:
        if node.op == "get_attr":
            value = attribute(gm, str(node.target)).detach()
            recast.take(node, value)
        else:
            value = _evaluate(node, values)
            recast.compute(node, value)
            read = len(readers[node]) < len(node.users) and node.target not in _MADE
            if isinstance(value, Tensor) and read:
                sites.append(Site(name_of(node), "constant", True))
                kind = "" if recast.follows(node, value) else f"{CONSTANT}_"
                _replace(gm, node, value, constants, f"{kind}{node.name}_constant")
        if readers[node]:
            values[node] = value
        for made_of in node.all_input_nodes:
            readers[made_of].discard(node)
            if not readers[made_of]:
                del values[made_of]
    return sites


class _Recast:
    """What the constants would be in a model cast to another type, without their numbers.

    `module.to(dtype)` casts buffers. A constant may be one only if the code, on weights that were
    cast, would compute it in that type: not what it casts itself, makes of whole numbers, or takes
    for complex, of which a cast leaves the real part.
    """

    def __init__(self) -> None:
        self._known: dict[fx.Node, Any] = {}

    def take(self, node: fx.Node, value: Tensor) -> None:
        other = torch.float32 if value.dtype == torch.float64 else torch.float64
        cast = value.is_floating_point() and not is_made(str(node.target))
        kind = other if cast else value.dtype
        self._known[node] = torch.empty_like(value, dtype=kind, device="meta")

    def compute(self, node: fx.Node, value: Any) -> None:
        if node.target in _MADE:
            self._known[node] = torch.empty_like(value, device="meta")
            return
        if not isinstance(value, Tensor):
            self._known[node] = value
        # Torch may be unable to compute it without numbers, or on this device.
        with contextlib.suppress(Exception):
            self._known[node] = _evaluate(node, self._known)

    def follows(self, node: fx.Node, value: Tensor) -> bool:
        """Whether a cast of `value` is what the code would compute; assumed if it is unknown."""
        if not value.is_floating_point():
            return not value.is_complex()
        known = self._known.get(node, value)
        return known is value or known.dtype != value.dtype


def _writes_into_own(node: fx.Node) -> bool:
    return any(one.op == "get_attr" for one in memory_of(*targets_of(node)))


def _evaluate(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args, kwargs = filled((node.args, node.kwargs), values.__getitem__)
    with torch.no_grad():
        return called(node, args, kwargs)


def _replace(
    gm: fx.GraphModule, node: fx.Node, value: Tensor, constants: Collection[fx.Node], name: str
) -> None:
    """Store `value` as a buffer, and let every user of `node` that is no constant read that."""
    name = fresh_name(gm, name)
    gm.register_buffer(name, apart(value.detach()))
    with gm.graph.inserting_before(node):
        constant = gm.graph.get_attr(name)
    constant.meta = dict(node.meta)
    node.replace_all_uses_with(constant, lambda user: user not in constants)
