"""What a graph of Dynamo's does besides computing, seen in a run on fake tensors.

These have shapes, strides and memory of their own and no values, so the run costs next to nothing,
writes nowhere, and shows which values would share memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.amp import autocast_mode

from ..models.modes import OperatorMode
from ..models.preserve import undrawn
from ..models.trees import storage_of, tensors_of
from ..shown import shown

TRAINS = "it is in training mode"


@dataclass(frozen=True)
class Behaviour:
    """What every node returned: `values` are fake, and may lie in one another's memory.

    `written` are the inputs that the graph writes into.
    """

    values: dict[fx.Node, Any]
    written: tuple[fx.Node, ...]

    def shares(self, node: fx.Node, other: fx.Node) -> bool:
        """Whether two nodes return tensors in the same memory."""
        return not self._memory(node).isdisjoint(self._memory(other))

    def is_same(self, node: fx.Node, other: fx.Node) -> bool:
        """Whether two nodes return the very same tensor: `x.float()` of what is float32."""
        return self.is_tensor(node) and self.values[node] is self.values.get(other)

    def is_tensor(self, node: fx.Node) -> bool:
        return isinstance(self.values.get(node), Tensor)

    def _memory(self, node: fx.Node) -> set[int]:
        return set(map(storage_of, tensors_of(self.values.get(node))))


class Unserved(Exception):
    """A graph does something that no plan does; the message says what."""


def behaviour(graph: fx.GraphModule, inputs: Sequence[Any]) -> Behaviour:
    """Run `graph` on fake tensors like `inputs`; raises Unserved for what must be left to torch.

    >>> graph = fx.symbolic_trace(lambda x: torch.dropout(x, 0.5, True))
    >>> behaviour(graph, [torch.ones(2)])
    Traceback (most recent call last):
    nhwc._compile.behaviour.Unserved: it draws random numbers
    """
    for reason in filter(None, map(_changes_torch, graph.graph.nodes)):
        raise Unserved(reason)
    bare = [x.detach() if isinstance(x, Tensor) else x for x in inputs]
    grad = torch.set_grad_enabled(torch.is_grad_enabled())
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    watch = _Watch()
    with ExitStack() as stack:
        for context in (torch.inference_mode(False), grad, undrawn(), fake, watch):
            stack.enter_context(context)
        given = [_like(fake, x) for x in bare]
        # They want gradients where the inputs do: the results tell what the graph makes of that.
        for one, x in zip(given, inputs, strict=True):
            if isinstance(x, Tensor) and x.requires_grad and not x.is_inference():
                one.requires_grad_()
        before = [x._version if isinstance(x, Tensor) else 0 for x in given]
        run = fx.Interpreter(graph, garbage_collect_values=False)
        try:
            results = run.run(*given, enable_io_processing=False)
        except Exception as error:
            # Fake tensors refuse whatever hangs on values, each operator in its own words.
            raise Unserved(f"its sizes do not follow from its inputs': {shown(error)}") from error
        after = [x._version if isinstance(x, Tensor) else 0 for x in given]
    if watch.reason:
        raise Unserved(watch.reason)
    # A view of an input that wants gradients says so, too, but has no history without them.
    given_memory = set(map(storage_of, tensors_of(given)))
    if any(
        t.requires_grad and (t.grad_fn is not None or storage_of(t) not in given_memory)
        for t in tensors_of((results, given))
    ):
        raise Unserved("it turns gradients on")
    places = graph.graph.find_nodes(op="placeholder")
    changes = zip(places, given, before, after, strict=True)
    return Behaviour(
        run.env,
        tuple(node for node, x, was, now in changes if was != now or watch.saw_writes_into(x)),
    )


def _like(fake: FakeTensorMode, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.is_inference():  # a fake one would not count what is written to it
        return torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
    return fake.from_tensor(value, static_shapes=True)


class _Watch(OperatorMode):
    """Notes operators whose result is not the same each time, and where operators write.

    `x.data` has the memory of `x`, but not its version.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reason = ""
        self._written: set[int] = set()

    def saw_writes_into(self, value: Any) -> bool:
        return not self._written.isdisjoint(map(storage_of, tensors_of(value)))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        arguments = func._schema.arguments
        given = dict(zip([one.name for one in arguments], args, strict=False)) | kwargs
        for argument in arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._written.update(map(storage_of, tensors_of(given.get(argument.name))))
        if given.get("train") is True or _updates_statistics(given):
            self.reason = TRAINS
        elif _is_random(func, given) and not self.reason:
            self.reason = "it draws random numbers"
        return func(*args, **kwargs)


def _updates_statistics(given: dict[str, Any]) -> bool:
    """Whether a batch norm trains: one without statistics, as in instance norms, is always so."""
    return given.get("training") is True and given.get("running_mean", 0) is not None


def _is_random(func: Any, given: dict[str, Any]) -> bool:
    if any(argument.name == "dropout_p" for argument in func._schema.arguments):
        return bool(given.get("dropout_p", 0.0))
    return torch.Tag.nondeterministic_seeded in func.tags


def is_idle(node: fx.Node) -> bool:
    """Whether `node` only sets what is so already where a plan runs: no gradients, no autocast."""
    if node.target in (torch._C._set_grad_enabled, torch._C._log_api_usage_once):
        return True
    if node.target is autocast_mode._exit_autocast:
        entered = node.args[0]
        return isinstance(entered, fx.Node) and is_idle(entered)
    return node.target is autocast_mode._enter_autocast and node.args[2] is False


def _changes_torch(node: fx.Node) -> str:
    """Why a node is no operator that a plan could run, if it is none."""
    if node.op != "call_function" or is_idle(node):
        return ""
    name = getattr(node.target, "__name__", str(node.target))
    if isinstance(node.target, HigherOrderOperator):
        return f"it calls {name}, which runs graphs of its own"
    home = getattr(node.target, "__module__", None) or ""
    if home == "torch._C" or home.startswith(_HOMES):
        return f"it calls {name}, which changes how torch computes"
    return ""


_HOMES = ("torch._C._functorch", "torch.amp", "torch.autograd", "torch._functorch", "torch._dynamo")
