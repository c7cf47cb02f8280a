"""Files that a command writes: checked before the work, written whole, printed if that fails."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path

from ..errors import InputError, missing
from ..machine.disk import put_file
from ..render.text import to_show
from ..zoo.archives import kind_of
from .progress import note, put

PICTURES = (".svg", ".png")

_ENDINGS = {"htm": "html", "txt": "text", "md": "markdown", "xml": "junit"}
_OF_OTHERS = ("json", "html", "csv", "markdown", "sarif", "junit", "svg", "png", "pdf")
"""What an ending asks for, if not of this command: text under such a name would mislead."""


def add_output_arguments(parser: argparse.ArgumentParser, formats: tuple[str, ...]) -> None:
    """Add --format and -o; without --format, the file's ending decides."""
    parser.add_argument("--format", choices=formats, help=f"default: {formats[0]}")
    words = "write here, not stdout"
    parser.add_argument("-o", "--output", metavar="FILE", type=_file_or_stdout, help=words)


def _file_or_stdout(name: str) -> Path | None:
    return None if name == "-" else Path(name)


def chosen_format(args: argparse.Namespace, formats: tuple[str, ...]) -> str:
    """Return the format that is asked for; refuse one that the command does not write."""
    if args.format:
        return str(args.format)
    ending = args.output.suffix.lower().lstrip(".") if args.output else ""
    ending = _ENDINGS.get(ending, ending)
    if ending in formats:
        return ending
    if ending in _OF_OTHERS:
        raise InputError(
            f"-o {args.output} asks for {ending}, which is not written here. "
            f"There are: {', '.join(formats)}."
        )
    return formats[0]


def check_outputs(*paths: Path | None, reads: Iterable[str | Path | None] = ()) -> None:
    """Refuse, before the work, outputs that cannot be written or that the command `reads`."""
    sources = [_file_of(str(name)) for name in reads if name is not None]
    given = [path for path in paths if path is not None]
    for place, path in enumerate(given):
        _check_place(path)
        if path.suffix == ".py" and path.exists():
            raise InputError(f"{path} is a Python file, which nhwc never writes. Name another.")
        if any(_same(path, source) for source in sources):
            raise InputError(f"{path} is what the command reads. Write to another file.")
        if any(_same(path, other) for other in given[:place]):
            raise InputError(f"{path} is named for two outputs. Name two files.")
        if path.is_file() and (kind := kind_of(path)).is_known:
            raise InputError(f"{path} is {kind.what}, which nhwc never writes. Name another.")


def check_folder(path: Path | None) -> None:
    """Refuse, before the work, a folder that cannot be made or written to."""
    if path is None:
        return
    _check_name(path)
    present = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not present.is_dir():
        raise InputError(f"cannot write to {path}: {present} is no folder. Name another.")
    if not os.access(present, os.W_OK | os.X_OK):
        raise InputError(f"cannot write to {path}: {present} may not be written to. Name another.")


def check_plot(path: Path | None) -> None:
    """Refuse, before the work, a picture that cannot be drawn."""
    if path is None:
        return
    if path.suffix not in PICTURES:
        raise InputError(f"--plot {path} has no known ending. Use .svg or .png.")
    if importlib.util.find_spec("matplotlib") is None:
        raise missing("matplotlib", "plot")


def write_output(text: str, path: Path | None) -> None:
    """Print `text`, or write it to `path`; if that fails, print it and raise."""
    text = to_show(text)
    if path is None:
        put(text)
        return
    try:
        write_file(path, as_bytes(text))
    except InputError:
        put(text)
        raise
    note(f"wrote {path}")


def as_bytes(text: str) -> bytes:
    """`text` as a file holds it; names of files may have bytes in them that are no characters."""
    return text.encode(errors="backslashreplace")


def write_file(path: Path, data: bytes) -> None:
    """Write beside `path` and rename: readers see the old file or the new one, whole."""
    try:
        put_file(path, [data])
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def _check_name(path: Path) -> None:
    if str(path) == "-":
        raise InputError("cannot write -, which stands for standard output elsewhere. Name a file.")


def _check_place(path: Path) -> None:
    _check_name(path)
    if path.is_dir():
        raise InputError(f"cannot write {path}: it is a folder. Name a file in it.")
    if not path.parent.is_dir():
        raise InputError(f"cannot write {path}: {path.parent} is no folder. Make it first.")
    if path.exists() and not path.is_file():
        return
    folder = Path(os.path.realpath(path)).parent
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"cannot write {path}: {folder} may not be written to.")


def _file_of(name: str) -> Path:
    """Return the file that a name of a model or a result refers to: net.py for `net.py:build`."""
    where, _, _ = name.rpartition(":")
    return Path(where if where.endswith(".py") else name)


def _same(one: Path, other: Path) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)
