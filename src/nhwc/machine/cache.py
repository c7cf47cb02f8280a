"""Files that nhwc keeps for itself between runs, in folders that no other user can write to.

A compiled kernel is native code: whoever can write to the folder it is found in can have it run.
So a folder is used only if nobody but its owner, who runs this process, can write to it or put
another in its place, and a file only if the same holds for it. Folders are made for their owner
alone. If the cache cannot be used, a warning says why, and each process compiles and measures for
itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from functools import cache
from pathlib import Path

from ..shown import shown
from .disk import replace_file, why_not
from .environment import cache_dir

_log = logging.getLogger("nhwc")

_LARGEST = 1 << 28
"""The most bytes that are read: nhwc writes no file that is larger."""

_WRITABLE = stat.S_IWGRP | stat.S_IWOTH
_LINKS = 40
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)

_OWN_ID = getattr(os, "geteuid", None)
"""None on a system without user numbers, where files are trusted without a check."""


def read_own(path: Path, largest: int = _LARGEST) -> bytes | None:
    """Return the content of a cache file; None if it is missing or others could have written it."""
    if not _is_ours(path.parent):
        return None
    try:
        # Do not follow a link in its place, nor wait for a pipe or a device.
        handle = os.open(path, os.O_RDONLY | _NOFOLLOW | _NONBLOCK)
    except OSError:
        return None
    with os.fdopen(handle, "rb") as file:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_size > largest:
            return None
        if why := _others(found, path):
            _say_once(why)
            return None
        try:
            return file.read()
        except OSError:
            return None


def write_own(path: Path, content: bytes) -> None:
    """Keep `content` for the next process, whole or not at all; a failure only costs it time."""
    if not make_own(path.parent):
        return
    try:
        replace_file(path, [content], private=True)
    except (OSError, ValueError) as error:
        _say_once(why_not(error), "cannot be written")


def make_own(folder: Path) -> bool:
    """Make `folder` for its owner alone if it is missing; return whether it is safe to use.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as there:
    ...     make_own(Path(there) / "plans"), oct((Path(there) / "plans").stat().st_mode & 0o777)
    (True, '0o700')
    """
    try:
        missing = [one for one in (folder, *folder.parents) if not os.path.lexists(one)]
        for one in reversed(missing):
            with contextlib.suppress(FileExistsError):
                one.mkdir(mode=0o700)
        os.stat(f"{folder}/")  # fails for a file that is in its place
    except (OSError, ValueError) as error:
        _say_once(why_not(error), "cannot be written")
        return False
    return _is_ours(folder)


def _is_ours(folder: Path) -> bool:
    """Whether nobody else can write to `folder`, or put another one in its place."""
    try:
        why = why_unsafe(folder)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError, RuntimeError) as error:
        why = f"{folder} cannot be looked at ({error})"
    if why:
        _say_once(why)
    return not why


def why_unsafe(folder: Path) -> str:
    """Say how others can write to `folder` or replace it; an empty string if they cannot."""
    if _OWN_ID is None:
        return ""
    found = os.stat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(folder)
    if why := _others(found, folder):
        return why
    for place in _places(folder.absolute()):
        above = os.lstat(place)
        if above.st_uid not in (_OWN_ID(), 0):
            return f"{place} belongs to another user"
        # The sticky bit, as on /tmp, lets others add names but not touch anyone else's.
        is_open = not stat.S_ISLNK(above.st_mode) and above.st_mode & _WRITABLE
        if is_open and not above.st_mode & stat.S_ISVTX:
            return f"others can write to {place}"
    return ""


def _places(path: Path) -> list[Path]:
    """List the folders and links that are looked up on the way to `path`, in order."""
    found: list[Path] = []
    waiting = list(reversed(path.parts[1:]))
    at, links = Path(path.anchor), 0
    while waiting:
        found.append(at)
        part = waiting.pop()
        below = at / part
        if below.is_symlink():
            links += 1
            if links > _LINKS:
                raise OSError(f"more than {_LINKS} links")
            found.append(below)
            target = Path(os.readlink(below))
            waiting += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            below = Path(target.anchor) if target.is_absolute() else at
        at = below
    return [*dict.fromkeys(found), at]


def _others(found: os.stat_result, place: Path) -> str:
    """Say who else may have written what was found at `place`; an empty string if nobody."""
    if _OWN_ID is None:
        return ""
    if found.st_uid not in (_OWN_ID(), 0):
        return f"{place} belongs to another user"
    return f"others can write to {place}" if found.st_mode & _WRITABLE else ""


@cache
def _say_once(why: str, what: str = "are not used") -> None:
    _log.warning(
        "nhwc: files under %s %s: %s. Kernels are compiled, and choices measured, for this process "
        "alone. Change that, or name a folder of your own in NHWC_CACHE.",
        shown(str(cache_dir())),
        what,
        shown(why),
    )
