"""The line that defines a model, found in its source without running it."""

from __future__ import annotations

import ast
import importlib.util
import linecache
from pathlib import Path

from ..watch.calls import CallSite


def definition_of(name: str) -> CallSite | None:
    """The line that defines the model called `name`, if that names code or a file.

    >>> definition_of("nhwc.zoo.definitions:definition_of").source
    'def definition_of(name: str) -> CallSite | None:'
    """
    where, _, what = name.rpartition(":")
    if where.endswith(".py"):
        file = Path(where)
    elif where in ("", "torchvision", "timm"):
        return CallSite("", "", str(Path(name).resolve()), 1, "") if Path(name).is_file() else None
    else:
        spec = importlib.util.find_spec(where)
        if spec is None or not spec.has_location or spec.origin is None:
            return None
        file = Path(spec.origin)
    if file.suffix != ".py":  # compiled, without its source
        return None
    # Bytes say in which encoding they are.
    statements = ast.parse(file.read_bytes()).body
    line = next((node.lineno for node in statements if what in _names(node)), 1)
    return CallSite("", "", str(file.resolve()), line, linecache.getline(str(file), line).strip())


def _names(node: ast.stmt) -> list[str]:
    """The names that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom | ast.Import):
        return [alias.asname or alias.name for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]
