"""The code that torch.fx writes for a graph, read before it is compiled.

A graph becomes Python source, and torch.fx copies some fields into it unchanged, such as the names
of keyword arguments: such a field could hold code. Each field that a file gives is checked where it
is read. This check knows none of those fields: it reads the source and allows only the statements
of a graph, with as many calls of each form as the graph has steps. So it also catches a field that
was forgotten, or that only a newer torch writes out.
"""

from __future__ import annotations

import ast
import builtins
from collections import Counter
from typing import Any

from torch import fx
from torch.fx.graph import inplace_methods, magic_methods

from .plain import Foreign

_ALLOWED = (
    *(ast.Assign, ast.AugAssign, ast.Return, ast.Pass, ast.Name, ast.Load, ast.Store),
    *(ast.Attribute, ast.Call, ast.keyword, ast.Constant, ast.Tuple, ast.List, ast.Dict),
    *(ast.Subscript, ast.BinOp, ast.UnaryOp, ast.Compare),
    *(ast.operator, ast.unaryop, ast.cmpop),
)
"""The syntax of generated code: no import, lambda, comprehension, f-string or walrus."""

_WRITTEN = frozenset(("slice", "device", "getattr", "complex"))
"""Functions that generated code calls to write down a value, or to reach a module by name."""


def check_code(graph: fx.Graph) -> None:
    """Raise Foreign where the source of `graph` has more in it than the steps of the graph."""
    code = graph.python_code("self")
    try:
        body = ast.parse(code.src).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Foreign(f"its code does not parse ({error})") from error
    if len(body) != 1 or not isinstance(body[0], ast.FunctionDef):
        raise Foreign("its code is more than one function")
    _check_signature(body[0], graph)
    arguments = {str(node.target) for node in graph.find_nodes(op="placeholder")}
    steps = {node.name for node in graph.nodes}
    if hidden := arguments & {*code.globals} - steps:
        raise Foreign(f"its arguments {', '.join(sorted(hidden))} hide what its code calls")
    names = steps | arguments | _WRITTEN | {"self", "Ellipsis", *code.globals}
    for part in (one for statement in body[0].body for one in ast.walk(statement)):
        if not isinstance(part, _ALLOWED) or not _is_known(part, names):
            raise Foreign(f"its code has {ast.unparse(part)[:60]!r}")
    if _calls_in(body[0]) != _calls_of(graph):
        raise Foreign("its code calls other things than its steps do")


def _check_signature(function: ast.FunctionDef, graph: fx.Graph) -> None:
    """Refuse arguments that are no placeholders, and defaults, which run at once, if not plain."""
    given = function.args
    plain = [*given.defaults, *(d for d in given.kw_defaults if d)]
    expected = ["self", *(str(n.target) for n in graph.find_nodes(op="placeholder"))]
    found = [argument.arg for argument in given.args]
    if found != expected or function.decorator_list or function.returns:
        raise Foreign(f"its code begins with {ast.unparse(given)[:60]!r}")
    for part in (one for default in plain for one in ast.walk(default)):
        fits = isinstance(
            part, (ast.Constant, ast.UnaryOp, ast.USub, ast.Load, ast.List, ast.Tuple)
        )
        if not fits and not (isinstance(part, ast.Name) and part.id in ("inf", "nan")):
            raise Foreign(f"its code has the default {ast.unparse(part)[:60]!r}")
    if any(argument.annotation for argument in given.args):
        raise Foreign("its code has annotations")


def _is_known(part: ast.AST, names: set[str]) -> bool:
    """Whether a name is one of `names`, and an attribute none of Python's own (`__x__`)."""
    if isinstance(part, ast.Name):
        return part.id in names
    if isinstance(part, ast.Attribute):
        return not part.attr.startswith("__")
    if isinstance(part, ast.Call) and _writes(part) == "getattr":
        name = part.args[1] if len(part.args) == 2 else None
        return isinstance(name, ast.Constant) and not str(name.value).startswith("__")
    return True


def _writes(call: ast.Call) -> str | None:
    """The function of `_WRITTEN` that the code calls here, or None."""
    name = call.func.id if isinstance(call.func, ast.Name) else ""
    return name if name in _WRITTEN else None


def _calls_in(function: ast.FunctionDef) -> Counter[Any]:
    """The calls in the code, counted by their number of arguments and their keywords."""
    return Counter(
        (len(call.args), tuple(keyword.arg for keyword in call.keywords))
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and _writes(call) is None
    )


def _calls_of(graph: fx.Graph) -> Counter[Any]:
    """The same count for the steps of the graph that are written as calls."""
    found: Counter[Any] = Counter()
    for node in graph.nodes:
        if node.op in ("call_function", "call_method", "call_module") and not _is_sign(node):
            found[len(node.args) - (node.op == "call_method"), tuple(node.kwargs)] += 1
    return found


def _is_sign(node: fx.Node) -> bool:
    """Whether the step is written with a sign, as `a + b`, `a[b]` and `a.b` are, or as a slice."""
    if node.target in (builtins.slice, builtins.getattr):
        return True
    name = getattr(node.target, "__name__", "")
    signs = (*magic_methods, *inplace_methods)
    return getattr(node.target, "__module__", "") == "_operator" and name in signs
