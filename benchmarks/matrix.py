"""Try nhwc on each Python and each torch that can be had here; write docs/versions.md.

    python -m benchmarks.matrix                       # what has no result yet
    python -m benchmarks.matrix --again --torch 2.15.0
    python -m benchmarks.matrix --page                # the pages alone, from the results

The wheel of this tree is built once. Each environment is made in a temporary folder, used and
removed, since a torch with its libraries takes gigabytes: every torch on one Python, then every
other Python with the newest torch that there is for it. `benchmarks.smoke` is what runs there, and
`nhwc ops` for the tables that docs/operators-changes.md compares. The first torch comes once more
at the end, to load the files of all others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nhwc._ops import Difference, OperatorTable, difference, load_table

from .smoke import RIGHT

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "versions"
PAGE = ROOT / "docs" / "versions.md"
CHANGES = ROOT / "docs" / "operators-changes.md"

LEAST_PYTHON, NEWEST_PYTHON = 10, 15
"""Minor versions of Python 3 that are looked for."""

LEAST_TORCH = (2, 11)
_MAIN_PYTHON = "3.11"
"""The Python on which every torch is tried: the newest for which each torch here is built."""

_EXTRAS = ("numpy", "numba", "expecttest", "pillow", "pyyaml", "safetensors", "huggingface_hub")
_PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")


@dataclass(frozen=True)
class Cell:
    """One environment: a Python, as `3.11`, and a torch, empty for the newest that there is."""

    python: str
    torch: str

    @property
    def path(self) -> Path:
        return RESULTS / f"python-{self.python}-torch-{self.torch or 'newest'}.json"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torch", action="append", help="only this version (default: all)")
    parser.add_argument("--python", action="append", help="only this version, as 3.12")
    parser.add_argument("--models", type=int, default=40, help="only the first of the models")
    parser.add_argument("--again", action="store_true", help="also what has a result already")
    parser.add_argument("--no-ops", action="store_true", help="measure no tables of operators")
    parser.add_argument("--page", action="store_true", help="run nothing, write the pages")
    args = parser.parse_args(argv)
    RESULTS.mkdir(parents=True, exist_ok=True)
    if not args.page:
        _run(args)
    PAGE.write_text(page(_results()))
    tables = [load_table(path) for path in sorted(RESULTS.glob("operators-*.json"), key=_number)]
    CHANGES.write_text(changes_page(tables))
    print(f"wrote {PAGE.name} and {CHANGES.name}")
    return 0


def _run(args: argparse.Namespace) -> None:
    pythons = interpreters()
    cells = _wanted(pythons, args)
    with tempfile.TemporaryDirectory(prefix="nhwc-matrix-") as name:
        folder = Path(name)
        wheel = build_wheel(folder / "wheel")
        done: set[Cell] = set()
        for cell in cells:
            print(f"python {cell.python}, torch {cell.torch or 'newest'}", flush=True)
            asked = ["--only-files"] if cell in done else ["--models", str(args.models)]
            _try(cell, pythons[cell.python], wheel, folder, asked, tables=not args.no_ops)
            done.add(cell)


def _wanted(pythons: dict[str, str], args: argparse.Namespace) -> list[Cell]:
    """The environments to run: all torches on one Python, the other Pythons with the newest."""
    found = [Cell(_MAIN_PYTHON, torch) for torch in torches(pythons[_MAIN_PYTHON])]
    # The newest comes first, so that the others load its files, and last, to load theirs.
    found = [*found[-1:], *found[:-1], *(Cell(one, "") for one in pythons if one != _MAIN_PYTHON)]
    found = [
        cell
        for cell in found
        if (not args.torch or cell.torch in args.torch)
        and (not args.python or cell.python in args.python)
        and (args.again or not cell.path.exists())
    ]
    return [*found, *found[:1]] if len(found) > 1 else found


def interpreters() -> dict[str, str]:
    """The Pythons of this machine: on the path, and pyenv's."""
    found = {}
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in range(LEAST_PYTHON, NEWEST_PYTHON + 1):
        name = f"3.{minor}"
        there = [str(path) for path in sorted(home.glob(f"{name}.*/bin/python"))]
        there += [path for path in [shutil.which(f"python{name}")] if path]
        for path in there:
            if subprocess.run([path, "-c", "import venv, ensurepip"]).returncode == 0:
                found[name] = path
                break
    return found


def torches(python: str) -> list[str]:
    """The last patch of each release of torch that pip finds for this Python, oldest first."""
    said = subprocess.run(
        [python, *_PIP[:-1], "index", "versions", "torch"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    last: dict[tuple[int, ...], tuple[int, ...]] = {}
    for text in re.findall(r"\b\d+\.\d+\.\d+\b", said):
        version = tuple(map(int, text.split(".")))
        last[version[:2]] = max(version, last.get(version[:2], ()))
    return [".".join(map(str, last[key])) for key in sorted(last) if key >= LEAST_TORCH]


def build_wheel(folder: Path) -> Path:
    """Build the wheel of this tree."""
    command = [sys.executable, *_PIP, "wheel", "--no-deps", "-w", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    return next(folder.glob("nhwc-*.whl"))


def _try(
    cell: Cell, python: str, wheel: Path, folder: Path, asked: Sequence[str], *, tables: bool
) -> None:
    """Make an environment, run the smoke test and the table of operators in it, remove it."""
    venv = folder / "environment"
    own = str(venv / "bin" / "python")
    # torch's threads and others' share what cores there are; what is asked is whether it works.
    environment = os.environ | {"NHWC_CACHE": str(folder / "cache"), "PYTHONPATH": ""}
    try:
        subprocess.run([python, "-m", "venv", str(venv)], check=True)
        wanted = f"torch=={cell.torch}" if cell.torch else "torch"
        _pip(own, wanted, *_EXTRAS)
        # Their own demands might bring another torch along.
        _pip(own, "--no-deps", "torchvision", "timm", str(wheel))
        command = [own, "-m", "benchmarks.smoke", "-o", str(cell.path)]
        command += ["--files", str(folder / "files"), *asked]
        subprocess.run(command, cwd=ROOT, env=environment)
        if cell.torch and tables and "--only-files" not in asked:
            table = RESULTS / f"operators-{cell.torch}.json"
            words = ["ops", "--no-timing", "--dtype", "float32", "-q", "-o", str(table)]
            subprocess.run([own, "-m", "nhwc", *words], cwd=folder, env=environment)
    except subprocess.CalledProcessError as error:
        print(f"  could not be set up: {error}", flush=True)
    finally:
        shutil.rmtree(venv, ignore_errors=True)


def _pip(python: str, *words: str) -> None:
    subprocess.run([python, *_PIP, "install", *words], check=True)


# The pages.


def _results() -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in RESULTS.glob("python-*.json")]
    return sorted(found, key=lambda one: (_key(one["python"]), _key(one["packages"]["torch"])))


def _key(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])))


def _number(path: Path) -> tuple[int, ...]:
    return _key(path.stem)


def page(results: Sequence[dict[str, Any]]) -> str:
    """docs/versions.md, from the results of all environments."""
    rows = [_row(one) for one in results]
    missing = [
        f"3.{minor}"
        for minor in range(LEAST_PYTHON, NEWEST_PYTHON + 1)
        if not any(_key(one["python"])[1] == minor for one in results)
    ]
    parts = [_HEAD, "\n".join((*_COLUMNS, *rows))]
    if missing:
        parts.append(f"Not tried: Python {', '.join(missing)}.")
    wrong = [line for one in results for line in _wrong(one)]
    parts.append("\n".join(("## What went wrong", "", *(wrong or ["Nothing."]))))
    return "\n\n".join(parts) + "\n"


_HEAD = """\
# Pythons and torches

Written by `python -m benchmarks.matrix` (`make matrix`): the wheel, installed in a new environment
with each Python and torch that could be had, and `benchmarks.smoke` run in it. *Verbs* are the
commands with small models, `torch.compile(backend="nhwc")` and an exported program; *models* are
torchvision's and timm's at 64x64, optimized and held against themselves, forty of them unless
`--models` asked for fewer; *files* are saved models of the other environments that were loaded and
answered as they did where they were saved.
[operators-changes.md](operators-changes.md) has what each torch changed for channels last."""

_COLUMNS = ("| Python | torch | numba | numpy | verbs | models | files |", "|---|" + "---|" * 6)


def _row(one: dict[str, Any]) -> str:
    packages = one["packages"]
    named = [one["python"], *(packages.get(name, "") for name in ("torch", "numba", "numpy"))]
    counts = [_count(one[kind].values()) for kind in ("verbs", "models", "files")]
    return f"| {' | '.join([*named, *counts])} |"


def _count(outcomes: Iterable[str]) -> str:
    said = list(outcomes)
    return f"{said.count(RIGHT)} of {len(said)}"


def _wrong(one: dict[str, Any]) -> list[str]:
    where = f"Python {one['python']}, torch {one['packages']['torch']}"
    every = {**one["verbs"], **one["models"], **one["files"]}
    return [f"- {where}, {name}: {said}" for name, said in every.items() if said != RIGHT]


def changes_page(tables: Sequence[OperatorTable]) -> str:
    """docs/operators-changes.md, from the tables of all torches, the oldest first."""
    machines = {f"{table.environment['processor']}" for table in tables}
    parts = [_CHANGES_HEAD, *(f"Measured on {machine}." for machine in sorted(machines))]
    for old, new in itertools.pairwise(tables):
        before, after = (str(table.environment["torch"]).partition("+")[0] for table in (old, new))
        slow = sorted(set(_too_slow(old)) | set(_too_slow(new)))
        found = [one for one in difference(old, new) if one.title not in slow]
        parts.append(f"## From {before} to {after}\n\n{_told(found)}")
        if slow:
            names = ", ".join(f"`{name}`" for name in slow)
            parts.append(f"Not compared, since a call took more than a minute: {names}.")
    if len(tables) < 2:
        parts.append("No two tables have been measured yet.")
    return "\n\n".join(parts) + "\n"


def _too_slow(table: OperatorTable) -> list[str]:
    """Operators that a busy machine did not get done, which says nothing about them."""
    return [
        operator.title
        for operator in table.operators
        if any("it took longer than" in row.example for row in operator.rows)
    ]


_CHANGES_HEAD = """\
# What each torch changed for channels last

Written by `python -m benchmarks.matrix`: the tables that `nhwc ops` measures in float32 on a CPU,
each held against that of the torch before, as `nhwc ops --diff OLD NEW` does. *Absent* is an
operator or a case that torch's own samples did not have."""


def _told(found: Sequence[Difference]) -> str:
    listed = [one for one in found if not one.aspect]
    changed = [one for one in found if one.aspect]
    lines = []
    for word, said in (("new", "listed"), ("gone", "absent")):
        names = [f"`{one.title}`" for one in listed if one.after == said]
        if names:
            lines.append(f"{word.capitalize()}: {', '.join(names)}.")
    if changed:
        rows = [
            f"| `{one.title}` | {one.aspect} | {one.dims}-D | {one.before} | {one.after} |"
            for one in changed
        ]
        heads = ("| operator | step | dimensions | before | after |", "|---|---|---|---|---|")
        lines.append("\n".join((*heads, *rows)))
    return "\n\n".join(lines) or "Nothing."


if __name__ == "__main__":
    sys.exit(main())
