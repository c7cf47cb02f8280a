"""Where a finding stands in a user's repository: the path from its root, the line, the columns."""

from __future__ import annotations

import linecache
import os
import re
from dataclasses import dataclass
from pathlib import Path

from ..watch.calls import CallSite
from .line_hashes import line_hashes


@dataclass(frozen=True)
class Location:
    """A line of source. Columns count from 1, and the last one is behind the code."""

    path: str
    """From the repository's root on, or from the package on where the file lies elsewhere."""
    line: int
    first_column: int
    last_column: int
    inside: bool
    """Whether the file lies in the repository."""
    line_hash: str
    """What GitHub's code scanning knows the line by; empty for a file that lies elsewhere."""


def repository_root(folder: Path) -> Path:
    """The folder around `folder` that holds a `.git`; `folder` itself where none does."""
    folder = folder.resolve()
    return next((place for place in (folder, *folder.parents) if (place / ".git").exists()), folder)


def located(site: CallSite, root: Path) -> Location | None:
    """Where `site` is, seen from `root`; None where it has no line."""
    if not site.file or site.line < 1:
        return None
    code = linecache.getline(site.file, site.line).rstrip() or site.source
    first = len(code) - len(code.lstrip()) + 1
    inside = _inside(site.file, root)
    hashes = _hashes(site.file) if inside else ()
    return Location(
        path=path_from(root, site.file),
        line=site.line,
        first_column=first,
        last_column=max(len(code), first) + 1,
        inside=inside,
        line_hash=hashes[site.line - 1] if site.line <= len(hashes) else "",
    )


def path_from(root: Path, file: str) -> str:
    """The path of a source file in words that hold on every machine.

    >>> path_from(Path("/repo"), "/env/lib/site-packages/timm/layers/norm.py")
    'timm/layers/norm.py'
    """
    _, packages, packaged = file.rpartition("-packages" + os.sep)
    if packages and not _inside(file, root):
        return Path(packaged).as_posix()
    real = Path(os.path.realpath(file))
    return (real.relative_to(root) if real.is_relative_to(root) else real).as_posix()


def named_from(root: Path, model: str) -> str:
    """The name of a model in words that hold in every folder: a file's path begins at the root.

    >>> named_from(Path("/repo"), "/repo/models/net.py:build")
    'models/net.py:build'
    """
    where, _, what = model.rpartition(":")
    if where.endswith(".py"):
        return f"{path_from(root, os.path.abspath(where))}:{what}"
    return path_from(root, os.path.abspath(model)) if os.path.isfile(model) else model


def _inside(file: str, root: Path) -> bool:
    """Whether `file` is the repository's own: a virtual environment may lie inside of it, too."""
    if re.search(r"(?:site|dist)-packages[/\\]", file):
        return False
    return Path(os.path.realpath(file)).is_relative_to(root)


def _hashes(file: str) -> tuple[str, ...]:
    try:
        return tuple(line_hashes(Path(file).read_text(encoding="utf-8", errors="replace")))
    except OSError:
        return ()
