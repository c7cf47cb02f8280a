"""What a package of rooms on floors must keep to, and where it does not.

A room is a file or a folder directly below the package. Rooms of one floor stand side by side: they
import what stands on floors below, and neither one another nor anything above.
"""

import ast
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path


@dataclass(frozen=True)
class Arrow:
    """An import: `source` and `target` are dotted names of modules; `late` if in a function."""

    source: str
    target: str
    late: bool


@dataclass(frozen=True)
class House:
    """`floors`, the lowest first, of the rooms of `package`, whose files lie in `root`.

    Rooms in `visitors` may come in by the front door: call the whole `package` as its users do.
    """

    root: Path
    package: str
    floors: tuple[tuple[str, ...], ...]
    visitors: frozenset[str] = frozenset()

    def rooms(self) -> set[str]:
        """The rooms that there are."""
        files = {file.stem for file in self.root.glob("*.py")}
        return files | {file.parent.name for file in self.root.glob("*/__init__.py")}

    def floor(self, room: str) -> int:
        """The number of the floor that a room stands on."""
        return next(number for number, rooms in enumerate(self.floors) if room in rooms)

    def arrows(self) -> list[Arrow]:
        """All imports of one module of the package by another, wherever they stand."""
        files = {_module(self.root, self.package, file): file for file in self.root.rglob("*.py")}
        found = []
        for module, file in sorted(files.items()):
            package = module if file.stem == "__init__" else module.rpartition(".")[0]
            for target, late in _imports(file.read_text(), package):
                # A name is a module of its own, or something that its module holds.
                known = target if target in files else target.rpartition(".")[0]
                if known in files and known != module and not self._is_visit(module, known, late):
                    found.append(Arrow(module, known, late))
        return found

    def upward(self) -> list[str]:
        """The imports that do not lead down from floor to floor."""
        wrong = []
        for arrow in self.arrows():
            room, target = self._room(arrow.source), self._room(arrow.target)
            if room != target and self.floor(room) <= self.floor(target):
                wrong.append(f"{arrow.source} imports {arrow.target}, which stands no lower")
        return wrong

    def circle(self) -> list[str]:
        """Files that import one another in a circle, the first again as the last; none is good."""
        graph: TopologicalSorter[str] = TopologicalSorter()
        for arrow in self.arrows():
            graph.add(arrow.source, arrow.target)
        try:
            graph.prepare()
        except CycleError as error:
            return list(error.args[1])
        return []

    def _room(self, module: str) -> str:
        return module.removeprefix(self.package).split(".")[1] if module != self.package else FRONT

    def _is_visit(self, module: str, target: str, late: bool) -> bool:
        return late and target == self.package and self._room(module) in self.visitors


FRONT = "__init__"


def _module(root: Path, package: str, file: Path) -> str:
    parts = file.relative_to(root).with_suffix("").parts
    return ".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts)))


@cache
def _imports(source: str, package: str) -> list[tuple[str, bool]]:
    """The dotted names that `source`, a module of `package`, imports; whether in a function."""
    tree = ast.parse(source)
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    late = {id(node) for function in functions for node in ast.walk(function)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = [*(above if node.level else []), *([node.module] if node.module else [])]
            names = [".".join((*base, alias.name)) for alias in node.names]
        else:
            continue
        found += [(name, id(node) in late) for name in names]
    return found
