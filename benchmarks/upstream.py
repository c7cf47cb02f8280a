"""Which bugs of torch that docs/upstream describes still stand in the torch that is installed?

    python -m benchmarks.upstream                 # a line for each page
    python -m benchmarks.upstream --record        # and docs/upstream/README.md anew

Each page has a program, which prints `right`, or `wrong` and how, or dies; it gets its own process.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

FOLDER = Path(__file__).parents[1] / "docs" / "upstream"
INDEX = FOLDER / "README.md"

_PATIENCE_S = 120
_PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_TABLE = re.compile(r"^\| \[.*$", re.MULTILINE)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help="write the table of all pages")
    args = parser.parse_args(argv)
    found = {}
    for path in pages():
        found[path.stem] = outcome(path)
        print(f"{path.stem}: {found[path.stem]}", flush=True)
    if args.record:
        INDEX.write_text(index(found))
    return 0


def pages() -> list[Path]:
    """The pages, each of one bug."""
    return sorted(path for path in FOLDER.glob("*.md") if path != INDEX)


def program(path: Path) -> str:
    """The program of a page: the first, if others vary it."""
    return str(_PROGRAM.findall(path.read_text())[0])


def outcome(path: Path) -> str:
    """Run the program of a page, and say what it says, or how it ended."""
    command = [sys.executable, "-W", "ignore", "-c", program(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        return f"wrong: it takes more than {_PATIENCE_S} s"
    return said(done.stdout, done.returncode)


def said(output: str, status: int) -> str:
    """The verdict of a program that printed this: one that shows a crash need not print any.

    >>> said("wrong: tril", 0), said("tensor(1.)", 0), said("", -11)
    ('wrong: tril', 'right', 'wrong: it ends with -11')
    """
    if status:
        return f"wrong: it ends with {status}"
    last = (output.strip().splitlines() or [""])[-1]
    return last if last.startswith(("right", "wrong")) else "right"


def index(found: Mapping[str, str]) -> str:
    """The table of all pages, with this torch as a column more, or anew."""
    version = torch.__version__.partition("+")[0]
    columns = {
        **recorded(),
        version: {name: one.partition(":")[0] for name, one in found.items()},
    }
    versions = sorted(columns, key=lambda one: tuple(map(int, one.split("."))))
    lines = [_HEAD, "", f"| bug | {' | '.join(versions)} |", "|---|" + "---|" * len(versions)]
    for path in pages():
        title = path.read_text().partition("\n")[0].removeprefix("# ")
        cells = " | ".join(columns[one].get(path.stem, "") for one in versions)
        lines.append(f"| [{title}]({path.name}) | {cells} |")
    return "\n".join(lines) + "\n"


def recorded() -> dict[str, dict[str, str]]:
    """What the table said so far: for each torch, each page's outcome."""
    if not INDEX.exists():
        return {}
    rows = [
        line.strip("| \n").split(" | ") for line in INDEX.read_text().splitlines() if "|" in line
    ]
    head = next((row for row in rows if row[0] == "bug"), ["bug"])
    found: dict[str, dict[str, str]] = {version: {} for version in head[1:]}
    for row in rows:
        link = re.search(r"\]\(([\w-]+)\.md\)", row[0])
        for version, word in zip(head[1:], row[1:], strict=False) if link else ():
            found[version][link[1] if link else ""] = word
    return found


_HEAD = """\
# Bugs of torch, each with the smallest program that shows it

Written by `python -m benchmarks.upstream --record`, once with each torch. Each page can be filed as
it stands: its program needs torch alone, and prints `right` or `wrong`, or dies."""


if __name__ == "__main__":
    sys.exit(main())
