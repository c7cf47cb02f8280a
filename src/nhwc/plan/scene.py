"""A graph on given shapes as the planner sees it: its layers, and how each may be computed.

A scene is made once, and handed on through measuring, weighing, assigning, joining and binding. It
holds values, not names: a name from the ledger or from a recipe is looked up in it, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from .. import kernels
from ..formats import Format
from ..graph import puts_back, result_may_be_view, written_into
from ..graph.code.mentions import asks_strides
from ..graph.nodes.flat import NotFlat, flattened
from ..graph.nodes.shapes import is_size
from ..models.preserve import drawn_so_far
from ..operators.kinds import STRIDE_METHODS
from .following import note_constants, note_numbers, note_places, note_tokens
from .implementation import Identifier, Implementation
from .masks import numbered
from .others import caller, kernels_of_others
from .padding import readers_of
from .parting import parted
from .recognize import is_opaque, layers_of
from .recording import Record, record
from .specs import Layer, OperatorSpec, Weighted, constants_of


class Unplannable(Exception):
    """This graph cannot be planned, and why; it still runs as it is."""


class UnknownKernel(Unplannable):
    """A recipe names a kernel that is not here."""


@dataclass(frozen=True)
class Scene:
    """Layers in an order in which they can run, and the implementations of each, by its node.

    `joints` are implementations that compute the layer in front as well, by the node of the second.
    Of an operator, `implementations` lacks torch's own kernel, which `called` makes. `inputs` are
    the leaves of those it was made on.
    """

    graph: fx.GraphModule
    record: Record
    layers: tuple[Layer, ...]
    implementations: dict[fx.Node, tuple[Implementation, ...]]
    joints: dict[fx.Node, Implementation]
    inputs: tuple[Any, ...] = ()

    @cached_property
    def readers(self) -> dict[fx.Node, set[fx.Node]]:
        """The nodes that read each value while a plan runs."""
        return readers_of(self.graph, self.layers)

    def kind(self, layer: Layer) -> str:
        """The key of its entry in the ledger: layers of one kind take the same time.

        It names the implementations: a newer nhwc, which has other ones, measures anew, and so
        does a layer whose answer lies otherwise than an equal one's.
        """
        known = (one.identifier for one in self.implementations[layer.node])
        names = [f"{name} {reads} {writes}" for name, reads, writes in known]
        names += ["torch"] * isinstance(layer.spec, OperatorSpec)
        return f"{layer.spec.key} of {', '.join(sorted(names))}"

    def kinds(self) -> dict[str, list[Layer]]:
        """The layers by their kind."""
        found: dict[str, list[Layer]] = {}
        for layer in self.layers:
            found.setdefault(self.kind(layer), []).append(layer)
        return found

    def called(self, layer: Layer, reads: Format | None, writes: Format | None) -> Implementation:
        """The layer's node as the graph has it, called by torch."""
        call = lambda *constants: caller(self.graph, self.record, layer.node)
        return Implementation("torch", reads, writes, call, copies=0.0)

    def offered(self, layer: Layer) -> tuple[Implementation, ...]:
        """All that may compute `layer`, also with the layer in front."""
        joint = self.joints.get(layer.node)
        return (*self.implementations[layer.node], *([joint] if joint else []))

    def find(self, layer: Layer, wanted: Identifier) -> Implementation:
        """The implementation that `wanted` names; raises UnknownKernel if there is none."""
        for one in self.offered(layer):
            if one.identifier == wanted:
                return one
        if isinstance(layer.spec, OperatorSpec) and wanted.name == "torch":
            reads, writes = (Format(x) if x else None for x in (wanted.reads, wanted.writes))
            return self.called(layer, reads, writes)
        raise UnknownKernel(
            f"{layer.name} has no kernel {wanted.name!r} from {wanted.reads} to {wanted.writes} "
            "here: another version of nhwc chose it, or another machine"
        )

    def constants(self, layer: Layer) -> tuple[Any, ...]:
        """Weight and bias, or scale and shift; nothing for an operator."""
        return () if isinstance(layer.spec, OperatorSpec) else constants_of(self.graph, layer)


_CLOSED = "no graph could be made of any part of it"


def scene_of(graph: fx.GraphModule, inputs: Sequence[Any], *, exact: bool = False) -> Scene:
    """The scene of `graph` on the shapes of `inputs`; raises Unplannable with the reason."""
    called = [one for one in graph.graph.nodes if one.op.startswith("call_") and one.users]
    if called and all(is_opaque(graph, one) for one in called):
        # What such a graph gives to its parts is no reason that anybody could mend.
        raise Unplannable(_CLOSED)
    try:
        graph, inputs = flattened(graph, inputs)
    except NotFlat as error:
        raise Unplannable(str(error)) from error
    reason = why_impure(graph, inputs)
    if reason is not None:
        raise Unplannable(reason)
    drawn = drawn_so_far()
    found = record(graph, inputs)
    for rewritten in (numbered, parted):
        apart = rewritten(graph, found)
        if apart is not None:
            graph, found = apart, record(apart, inputs)
    if drawn_so_far() != drawn:
        # In another layout the same numbers would fall on other pixels.
        raise Unplannable("it draws random numbers")
    if found.foreign is not None:
        name = found.foreign.name
        raise Unplannable(f"{name} makes a sparse, nested, quantized or negated tensor")
    for node, target in found.writes:
        reason = why_seen(node, target)
        if reason is not None:
            raise Unplannable(reason)
    note_constants(graph, found)
    reason = _why_by_layout(graph, found)
    if reason is not None:
        raise Unplannable(f"{reason}, which a plan decides")
    note_numbers(found)
    note_places(found)
    note_tokens(graph, found)
    layers = layers_of(graph, found)
    if all(is_opaque(graph, layer.node) for layer in layers):
        raise Unplannable(_CLOSED)
    return _scene(graph, found, layers, tuple(inputs), exact)


def _why_by_layout(graph: fx.GraphModule, record: Record) -> str | None:
    """What the first call does by how a value lies in memory, if inputs reach that."""
    own: set[fx.Node] = set()
    node: fx.Node
    for node in graph.graph.nodes:
        if node.op != "placeholder" and own.issuperset(node.all_input_nodes):
            own.add(node)
        elif is_opaque(graph, node):
            asked = asks_strides(graph.get_submodule(str(node.target)))
            if asked:
                return f"code of {node.name} {asked}"
        elif node.op in ("call_function", "call_method"):
            asks = getattr(node.target, "__name__", node.target) in STRIDE_METHODS
            of = node.args[0] if asks and node.args else None
            if isinstance(of, fx.Node) and of not in own and not record.is_given(of):
                return f"{node.name} asks how a tensor lies in memory"
    return None


def _scene(
    graph: fx.GraphModule,
    record: Record,
    layers: Sequence[Layer],
    inputs: tuple[Any, ...],
    exact: bool,
) -> Scene:
    known = [x for x in layers if isinstance(x.spec, Weighted) or not is_opaque(graph, x.node)]
    known = [x for x in known if not views_strange(record, x) and x.node not in record.beside]
    found = {layer.node: kernels_of_others(layer) for layer in layers}
    joints: dict[fx.Node, Implementation] = {}
    if kernels.available():
        # This loads LLVM's compiler: nothing but planning has to wait for it, or to have it.
        from .native import joints_of, kernels_of_ours

        for layer in known:
            found[layer.node] += kernels_of_ours(graph, record, layer)
        ours = [x for x in layers if any(one.ours for one in found[x.node])]
        joints = joints_of(record, ours, readers_of(graph, layers))
    allowed = {node: tuple(i for i in some if i.exact or not exact) for node, some in found.items()}
    return Scene(graph, record, tuple(layers), allowed, joints, inputs)


def views_strange(record: Record, layer: Layer) -> bool:
    """Whether the result of an operator may share an input that the plan copies for the others."""
    if not isinstance(layer.spec, OperatorSpec) or record.strange.isdisjoint(layer.inputs):
        return False
    return result_may_be_view(layer.node)


def why_impure(graph: fx.GraphModule, inputs: Sequence[Any] = ()) -> str | None:
    """Why `graph` cannot be planned, or None if it can: its nodes must only return values.

    A plan gives every value a layout of its own, by copying where needed: a node that writes into
    another node's value would write into the copy. Writing into a value that nobody else can see is
    no harm, and `ReLU(inplace=True)` right behind its convolution is the most common case; nor is
    putting a result into an input at the very end. What `inputs` are tells which conversions make
    new values, as `float` does of bytes.
    """
    given = dict(zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=False))
    for node in graph.graph.nodes:
        target = written_into(node)
        if target is None or puts_back(node):
            continue
        anew = isinstance(target, fx.Node) and _converts(target, given)
        reason = why_seen(node, target, anew=anew)
        if reason is not None:
            return reason
    return None


def why_seen(node: fx.Node, target: object, *, anew: bool = False) -> str | None:
    """Why something else may see that `node` writes into `target`, or None if nothing can.

    `anew` says that `target` is surely no view, though it may look like one.
    """
    if not isinstance(target, fx.Node) or target.op in ("placeholder", "get_attr"):
        return f"{node.name} writes into {target}, which outlives the call"
    # Reading only its shape, as timm's norms do, does not count: no write changes that. What was
    # read before the write does: a step may be joined with a later one.
    readers = [user for user in target.users if user is not node and not is_size(user)]
    if readers or (result_may_be_view(target) and not anew):
        return f"{node.name} writes into {target.name}, which others may read"
    return None


def _converts(node: fx.Node, given: dict[fx.Node, Any]) -> bool:
    """Whether it makes numbers of another type than the input has that it is made of."""
    wanted: Any = _TYPES.get(str(node.target))
    if node.target in ("to", "type") and len(node.args) > 1 and not node.kwargs:
        wanted = node.args[1]
    source: Any = node.args[0] if node.op == "call_method" else None
    while isinstance(source, fx.Node) and source.op == "call_method" and source.target in _VIEWS:
        source = source.args[0]
    held = given.get(source)
    return isinstance(wanted, torch.dtype) and isinstance(held, Tensor) and held.dtype != wanted


_TYPES = {name: getattr(torch, name) for name in ("float", "double", "half", "bfloat16")}
_VIEWS = ("permute", "transpose", "movedim", "unsqueeze", "squeeze", "contiguous", "reshape")
"""Methods that keep the type of their tensor."""
