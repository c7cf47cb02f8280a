"""Find what the code of a class hands to convolutions as weights: read it, never run it."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from typing import Any

CONVOLUTIONS = frozenset(
    [
        *("conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d"),
        *("convolution", "_convolution"),
        *("cudnn_convolution_relu", "cudnn_convolution_add_relu"),
    ]
)
"""The names of torch's 2-D and 3-D convolutions in Python, in graphs and in TorchScript."""


def weights_in_code(kind: type) -> frozenset[str]:
    """The attributes of `self` that methods of `kind` read or compute a convolution's weight from.

    Torch's own classes are not read. A class without readable source has none.
    """
    return _Methods(kind).attributes() if _names_convolution(kind) else frozenset()


def _names_convolution(kind: type) -> bool:
    """Whether code of the class may call one; to parse its source takes far longer than that."""
    users = [base for base in kind.__mro__ if not _is_torchs(base)]
    values = [
        inspect.unwrap(_function_in(value)) for base in users for value in vars(base).values()
    ]
    codes = [value.__code__ for value in values if isinstance(value, types.FunctionType)]
    while codes:
        code = codes.pop()
        if not CONVOLUTIONS.isdisjoint(code.co_names):
            return True
        codes += [one for one in code.co_consts if isinstance(one, types.CodeType)]
    return False


def _function_in(value: Any) -> Any:
    return getattr(value, "fget", None) or getattr(value, "__func__", value)


def _is_torchs(kind: type) -> bool:
    return kind is object or kind.__module__.startswith("torch.")


class _Methods:
    """The methods of a user's class, searched for the weights that they hand to convolutions."""

    def __init__(self, kind: type) -> None:
        self.methods: dict[str, ast.FunctionDef] = {}
        for base in kind.__mro__:
            if _is_torchs(base):
                continue
            for item in _body_of(base):
                if isinstance(item, ast.FunctionDef):
                    _call_it_self(item)
                    self.methods.setdefault(item.name, item)

    def attributes(self) -> frozenset[str]:
        """The attributes of `self` that some weight is read or computed from."""
        found: set[str] = set()
        for method in self.methods.values():
            assigned = _assignments(method)
            for call in ast.walk(method):
                if isinstance(call, ast.Call) and _called(call) in CONVOLUTIONS:
                    named = [k.value for k in call.keywords if k.arg == "weight"]
                    for weight in (*call.args[1:2], *named):
                        self._read(weight, assigned, found, set())
        return frozenset(found)

    def _read(
        self,
        value: ast.AST,
        assigned: dict[str, list[ast.AST]],
        found: set[str],
        passed: set[str],
    ) -> None:
        for node in ast.walk(value):
            if isinstance(node, ast.Attribute) and _is_self(node.value):
                found.add(node.attr)
                method = self.methods.get(node.attr)
                if method is not None and f"self.{node.attr}" not in passed:
                    passed.add(f"self.{node.attr}")
                    inside = _assignments(method)
                    for part in ast.walk(method):
                        if isinstance(part, ast.Return) and part.value is not None:
                            self._read(part.value, inside, found, {*passed})
            elif isinstance(node, ast.Name) and node.id in assigned and node.id not in passed:
                passed.add(node.id)
                for given in assigned[node.id]:
                    self._read(given, assigned, found, passed)


def _body_of(kind: type) -> list[ast.stmt]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return []
    return tree.body if isinstance(tree, ast.ClassDef) else []


def _call_it_self(method: ast.FunctionDef) -> None:
    """Let the first argument of a method be called `self` throughout."""
    first = [one.arg for one in (*method.args.posonlyargs, *method.args.args)][:1]
    if "staticmethod" in map(ast.unparse, method.decorator_list):
        return
    for node in ast.walk(method):
        if isinstance(node, ast.Name) and node.id in first:
            node.id = "self"


def _assignments(method: ast.FunctionDef) -> dict[str, list[ast.AST]]:
    """The values that are assigned to each local name, anywhere in the method."""
    found: dict[str, list[ast.AST]] = {}
    for node in ast.walk(method):
        if isinstance(node, ast.Assign):
            pairs: list[tuple[ast.AST, ast.AST | None]] = [(t, node.value) for t in node.targets]
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
            pairs = [(node.target, node.value)]
        elif isinstance(node, (ast.For, ast.comprehension)):
            pairs = [(node.target, node.iter)]
        else:
            continue
        for target, value in pairs:
            for part in ast.walk(target):
                if isinstance(part, ast.Name) and value is not None:
                    found.setdefault(part.id, []).append(value)
    return found


def _called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
