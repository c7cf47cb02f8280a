"""Open an opaque part: put graphs in the place of those of its children where nobody can tell."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import fx, jit, nn

from .tracer import is_leaf

TraceChild = Callable[[nn.Module, str], nn.Module | None]


def open_shell(
    shell: nn.Module, path: str, trace: TraceChild, above: tuple[_Mentions | None, ...] = ()
) -> None:
    """Replace children of `shell`, whose own code stays as it is, with graphs of them, in place.

    A child is replaced only if the code around it does nothing with it but call it: a graph has
    neither the methods nor the class of the module it was made of. Otherwise its own children
    are tried.
    """
    if isinstance(shell, jit.ScriptModule) or is_leaf(shell):
        return
    above = (*above, _mentions(type(shell)))
    for name, child in list(shell.named_children()):
        below = f"{path}.{name}" if path else name
        if isinstance(child, fx.GraphModule):
            continue
        if not _runs(child) or not _only_called(name, child, above):
            open_shell(child, below, trace, above)
        else:
            graph = trace(child, below)
            if graph is not None:
                setattr(shell, name, graph)


def _runs(module: nn.Module) -> bool:
    """Whether the module is called at all: a ModuleList only holds others."""
    return not isinstance(module, nn.ModuleList | nn.ModuleDict) and _takes_only_inputs(module)


def _takes_only_inputs(module: nn.Module) -> bool:
    """Whether every argument must be passed: a graph is fixed to the defaults of the others."""
    parameters = inspect.signature(module.forward).parameters.values()
    return all(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


@dataclass(frozen=True)
class _Mentions:
    """How the code of a class speaks of other things."""

    otherwise: frozenset[str]
    read_off_others: frozenset[str]
    names: frozenset[str]


def _only_called(name: str, child: nn.Module, above: tuple[_Mentions | None, ...]) -> bool:
    own = _own_names(child)
    kinds = {base.__name__ for base in type(child).__mro__[: type(child).__mro__.index(nn.Module)]}
    for said in above:
        if said is None or own & said.read_off_others or kinds & said.names:
            return False
        by_type = said.names & {"isinstance", "type", "hasattr", "__class__"}
        if by_type and not name.isidentifier():
            return False
    holder = above[-1]
    return holder is not None and name not in holder.otherwise


def _own_names(module: nn.Module) -> set[str]:
    """What can be read off this module and not off a graph, whatever the value it is read off.

    What torch's containers have (`append`, `items`) is read off many a plain list and dict.
    """
    bases = type(module).__mro__
    users = (base for base in bases if not base.__module__.startswith(("torch.", "builtins")))
    names = {name for base in users for name in vars(base)} - set(dir(nn.Module))
    names |= {key for key in vars(module) if not key.startswith("_")} - {"training"}
    names |= {*module._modules, *module._parameters, *module._buffers}
    return names - {"forward", "0", "1", "2"}


def _mentions(kind: type) -> _Mentions | None:
    """What the methods of `kind` mention; None if the code cannot be seen."""
    all_own: list[str] = []
    others: set[str] = set()
    names: set[str] = set()
    direct: list[str] = []
    for tree in _methods(kind):
        if tree is None:
            return None
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _of_self(node.func):
                direct.append(node.func.attr)  # type: ignore[attr-defined]
            if isinstance(node, ast.Compare) and _of_self(node.left) and _with_none(node):
                direct.append(node.left.attr)  # type: ignore[attr-defined]
            if isinstance(node, ast.Attribute) and _of_self(node):
                all_own.append(node.attr)
            elif isinstance(node, ast.Attribute):
                others.add(node.attr)
            elif isinstance(node, ast.Name):
                names.add(node.id)
    otherwise = {name for name in set(all_own) if all_own.count(name) > direct.count(name)}
    return _Mentions(frozenset(otherwise), frozenset(others), frozenset(names))


def _methods(kind: type) -> Iterator[ast.AST | None]:
    for base in kind.__mro__:
        if base in (nn.Module, object) or base.__module__.startswith("torch.nn."):
            continue
        try:
            source = textwrap.dedent(inspect.getsource(base))
            body = ast.parse(source).body[0]
        except (OSError, TypeError, SyntaxError):
            yield None
            return
        for item in getattr(body, "body", []):
            if isinstance(item, ast.FunctionDef) and item.name != "__init__":
                yield item


def _of_self(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _with_none(node: ast.Compare) -> bool:
    return all(isinstance(side, ast.Constant) and side.value is None for side in node.comparators)
