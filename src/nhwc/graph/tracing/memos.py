"""What code computes once for each device, of the model's own tensors, and keeps in a dict.

    key = str(x.device)
    if key not in self.biases:
        self.biases[key] = self.table[:, self.places]
    return self.biases[key]

LeViT, EfficientFormer and TinyViT do so. A trace gives such code a key that no dict has: the graph
computes anew, in each call, what the code would have kept.
"""

from __future__ import annotations

import ast
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx, jit, nn

from ..code.asks import makes_text
from ..code.mentions import tree_of
from ..nodes.computed import is_computed_from_arguments
from ..nodes.edit import called, filled, held
from ..nodes.shapes import node_of


class DeviceKey(str):
    """The name of a traced device, which is equal to itself alone."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def uses_as_key(frame: FrameType) -> bool:
    """Whether this frame calls `str`, and all that its code makes so are keys of dicts."""
    tree = tree_of(frame.f_code) if makes_text(frame) else None
    if tree is None:
        return False
    around = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    names = [node for node in around if isinstance(node, ast.Name)]
    texts = [around[name] for name in names if name.id == "str"]
    return bool(texts) and all(_is_kept(around[text], names, around) for text in texts)


def _is_kept(user: ast.AST, names: list[ast.Name], around: dict[ast.AST, ast.AST]) -> bool:
    match user:
        case ast.Assign(targets=[ast.Name(id=key)], value=ast.Call()):
            named = [name for name in names if name.id == key]
            read = [name for name in named if isinstance(name.ctx, ast.Load)]
            return len(named) == len(read) + 1 and all(_is_key(one, around[one]) for one in read)
    return False


def _is_key(name: ast.Name, user: ast.AST) -> bool:
    match user:
        case ast.Subscript(value=ast.Attribute(), slice=key):
            return key is name
        case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[ast.Attribute()]):
            return key is name
    return False


def forget_kept(module: nn.Module) -> None:
    """Take from the dicts of `module` and its parts what a trace has put there by a `DeviceKey`.

    It stays, as a change, if it may be another one in another call, or if it is not what the dict
    has for a device already: code that loads other weights may have left old values there.
    """
    for part in module.modules():
        if isinstance(part, jit.ScriptModule):
            continue
        for memo in [value for value in vars(part).values() if type(value) is dict]:
            for key in [key for key in memo if type(key) is DeviceKey]:
                node = node_of(memo[key])
                root: Any = getattr(getattr(memo[key], "tracer", None), "root", None)
                before = [item for item in memo.items() if type(item[0]) is not DeviceKey]
                if node and _is_fixed(node) and all(_agrees(node, root, *one) for one in before):
                    del memo[key]


def _is_fixed(node: fx.Node) -> bool:
    """Whether this follows from the model's own tensors and from a device."""
    if node.op == "get_attr" or _is_device(node):
        return True
    return is_computed_from_arguments(node) and all(map(_is_fixed, node.all_input_nodes))


def _is_device(node: fx.Node) -> bool:
    return node.target is getattr and node.args[1] == "device"


def _agrees(node: fx.Node, root: nn.Module, device: Any, kept: Any) -> bool:
    value = _value(node, root, device)
    same = isinstance(kept, Tensor) and value.shape == kept.shape and value.dtype == kept.dtype
    return same and torch.equal(value.to(kept.device), kept)


def _value(node: fx.Node, root: nn.Module, device: str) -> Any:
    if node.op == "get_attr":
        return held(root, str(node.target))
    if _is_device(node):
        return torch.device(device)
    return called(node, *filled((node.args, node.kwargs), lambda one: _value(one, root, device)))
