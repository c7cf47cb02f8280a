"""Small changes to a graph, and the cleaning up after them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...models.trees import has_strides
from .names import sayable


def module_of(node: object) -> nn.Module | None:
    """Return the module that a `call_module` node calls; None for anything else."""
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    owner = node.graph.owning_module
    assert owner is not None
    return owner.get_submodule(str(node.target))


def attribute(owner: nn.Module, path: str) -> Any:
    """Return the parameter, buffer or constant at a dotted path."""
    for part in path.split("."):
        owner = getattr(owner, part)
    return owner


def held(owner: nn.Module, path: str) -> Any:
    """As `attribute`, but what the module holds itself: a trace has another answer for tensors."""
    home, _, name = path.rpartition(".")
    module = owner.get_submodule(home)
    return {**vars(module), **module._parameters, **module._buffers}[name]


def bound(node: fx.Node, names: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a call by name, where torch has them in this order."""
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def numbers_given(node: fx.Node) -> Any:
    """What a method such as `view` or `permute` is given, one by one or as a list."""
    given = node.args[1:]
    return given[0] if len(given) == 1 else given


def filled(arguments: Any, value_of: Callable[[fx.Node], Any]) -> Any:
    """Replace the nodes in arguments by their values; lists and dicts become plain, mutable ones.

    >>> filled(([1, 2], {"dim": 0}), lambda node: None)
    ([1, 2], {'dim': 0})
    """
    if isinstance(arguments, fx.Node):
        return value_of(arguments)
    if isinstance(arguments, list):
        return [filled(item, value_of) for item in arguments]
    if isinstance(arguments, dict):
        return {key: filled(item, value_of) for key, item in arguments.items()}
    if type(arguments) is tuple:
        return tuple([filled(item, value_of) for item in arguments])
    return fx.node.map_arg(arguments, value_of)


class Interpreter(fx.Interpreter):
    """Runs a graph step by step, with lists and dicts that functions may write into, as its code
    has them."""

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        return filled((n.args, n.kwargs), self.env.__getitem__)


def called(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """What the function or the method that `node` calls returns for these arguments."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def replace_module(node: fx.Node, module: nn.Module) -> None:
    """Let `node` call `module`; the old module keeps its path only if other nodes need it."""
    owner, target = node.graph.owning_module, str(node.target)
    assert owner is not None
    if _needed_elsewhere(node):
        target = fresh_name(owner, target.replace(".", "_"))
        node.target = target
    owner.add_submodule(target, module)


def add_module(graph: fx.Graph, name: str, module: nn.Module, args: tuple[Any, ...]) -> fx.Node:
    """Install `module` under a name like `name`, and insert a call of it."""
    owner = graph.owning_module
    assert owner is not None
    target = fresh_name(owner, name)
    owner.add_submodule(target, module)
    return graph.call_module(target, args)


def erase(node: fx.Node, instead: fx.Node) -> None:
    """Let every user of `node` use `instead`, and remove `node`."""
    node.replace_all_uses_with(instead)
    node.graph.erase_node(node)


def clean(gm: fx.GraphModule) -> fx.GraphModule:
    """Remove unused nodes, modules and tensors, check the graph, and generate its code anew."""
    for node in reversed(list(gm.graph.nodes)):
        if not node.users and _without_effect(node):
            gm.graph.erase_node(node)
    gm.delete_all_unused_submodules()
    _drop_unread_tensors(gm)
    gm.graph.lint()
    gm.recompile()
    return gm


def _needed_elsewhere(node: fx.Node) -> bool:
    target = str(node.target)
    for other in node.graph.nodes:
        if other is node or other.op not in ("call_module", "get_attr"):
            continue
        path = str(other.target)
        if path == target or path.startswith(target + ".") or target.startswith(path + "."):
            return True
    return False


def fresh_name(owner: nn.Module, name: str) -> str:
    """Return a name like `name` that `owner` does not have and that generated code can use."""
    name = sayable(name)
    count, fresh = 0, name
    while hasattr(owner, fresh):
        count += 1
        fresh = f"{name}_{count}"
    return fresh


_READING = {getattr, operator.getitem, operator.eq, operator.add, operator.sub, operator.mul}
_READING |= {operator.floordiv, operator.truediv, operator.mod, operator.neg, operator.pow}


def _without_effect(node: fx.Node) -> bool:
    if node.op == "call_function":
        return node.target in _READING
    return node.op == "get_attr" or (node.op, node.target) in {
        ("call_method", "size"),
        ("call_method", "dim"),
    }


def _drop_unread_tensors(gm: fx.GraphModule) -> None:
    """Delete parameters and buffers that no node reads from modules that only hold others."""
    read = {str(node.target) for node in gm.graph.nodes if node.op == "get_attr"}
    called = {str(node.target) for node in gm.graph.nodes if node.op == "call_module"}
    holders = {""} | {name for name, m in gm.named_modules() if type(m) is nn.Module}
    for holder in holders - called:
        if any(holder.startswith(f"{path}.") for path in called):
            continue
        module = gm.get_submodule(holder)
        for slots in (module._parameters, module._buffers):
            for name in list(slots):
                if (f"{holder}.{name}" if holder else name) not in read:
                    del slots[name]


def copied(node: fx.Node, root: nn.Module) -> tuple[fx.Node, fx.Node]:
    """Two nodes behind `node`, a constant: the first reads it, the last is a copy that lies as it.

    `clone` closes the gaps of a tensor, and repeats what an expanded one holds once. So `root` gets
    one with all that lies in its memory: files close gaps, too.
    """
    value = attribute(root, str(node.target))
    graph = node.graph
    with graph.inserting_before(node.next):
        if not has_strides(value) or _dense(value):
            copy = graph.call_method("clone", (node,))
            return copy, copy
        steps = zip(value.shape, value.stride(), strict=True)
        extent = 1 + sum((size - 1) * step for size, step in steps)
        home, _, name = f"{node.target}_whole".rpartition(".")
        root.get_submodule(home).register_buffer(name, value.as_strided((extent,), (1,)))
        whole = graph.get_attr(f"{node.target}_whole")
        copy = graph.call_method("clone", (whole,))
        laid = (tuple(value.shape), value.stride())
        return whole, graph.call_function(torch.as_strided, (copy, *laid))


def _dense(value: Tensor) -> bool:
    return torch.empty_like(value, device="meta").stride() == value.stride() or not value.numel()
