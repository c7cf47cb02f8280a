"""Who may import whom. The verbs stand side by side; nobody imports what shows or composes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import nhwc

ROOT = Path(nhwc.__file__).parent
VERBS = {"_audit", "optimizer", "benchmark", "operators", "training"}
LAST = {"render", "cli"}
LOWEST = {"disk", "errors", "formats", "environment", "timing"}
FRONT = {"__init__", "__main__", "_public", "testing"}


def imports(source: str, package: list[str]) -> Iterator[str]:
    """The first-level nhwc modules that `source`, a module of `package`, imports anywhere."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = base + (node.module.split(".") if node.module else [])
            targets = [[*module, alias.name] for alias in node.names]
        else:
            continue
        yield from (t[1] for t in targets if t[0] == "nhwc" and len(t) > 1)


def allowed(room: str, target: str) -> bool:
    if room == target or room in FRONT or room == "cli":
        return True
    if target in LAST or (target in VERBS and room != "render"):
        return False
    return target in LOWEST if room in LOWEST else True


def wrong_imports(files: list[Path]) -> list[str]:
    wrong = []
    for file in files:
        parts = file.relative_to(ROOT.parent).with_suffix("").parts
        room = parts[1]
        for target in imports(file.read_text(), list(parts[:-1])):
            if not allowed(room, target):
                wrong.append(f"{room} imports {target}: {file.name}")
    return wrong


def test_rooms_import_only_what_they_may():
    assert wrong_imports(sorted(ROOT.rglob("*.py"))) == []


@pytest.mark.parametrize(
    ("source", "package", "room", "target"),
    [
        ("from ..cli import main", ["nhwc", "operators"], "operators", "cli"),
        ("from .optimizer import optimize", ["nhwc"], "_audit", "optimizer"),
        ("def f():\n    import nhwc.render.text", ["nhwc"], "plan", "render"),
        ("from . import zoo", ["nhwc"], "formats", "zoo"),
    ],
)
def test_the_check_can_fail(source, package, room, target):
    assert target in set(imports(source, package))
    assert not allowed(room, target)


def test_all_is_sorted_and_complete():
    assert nhwc.__all__ == sorted(nhwc.__all__)
    assert all(hasattr(nhwc, name) for name in nhwc.__all__)
