"""Writing a file whole or not at all, and reading one without waiting for anybody."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

_UNNAMED = getattr(os, "O_TMPFILE", 0)
"""Linux makes a file without a name for this flag; it vanishes with the process that writes it."""

_READING = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_UNBLOCKED = getattr(os, "O_NONBLOCK", 0)


def replace_file(path: Path, parts: Iterable[bytes | memoryview], *, private: bool = False) -> None:
    """Write beside `path` and rename: readers see the old file or the new one, whole.

    Raises OSError as the system does; no half-written file is left behind, and where the system
    has files without a name, not even by a process that is killed. A `private` file is its
    owner's alone, and may be lost if the machine loses power.
    """
    folder = path.parent
    # The name does not repeat that of the file, which may be as long as a name can be.
    name = folder / f".nhwc-{secrets.token_hex(8)}"
    handle, named = _opened(folder, name, 0o600 if private else 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
            file.flush()
            if not private:
                # The rename may reach the disk before the content, which must not be lost then.
                os.fsync(handle)
            if not named:
                _give_name(handle, name)
                named = True
        os.replace(name, path)
    except BaseException:
        if named:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
        raise


def put_file(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write what a user names: a file is replaced, also behind a link.

    /dev/stdout or a pipe is written into; a file put in its place would not be one.
    """
    # Ask before links are resolved: that of /dev/stdout to a pipe leads to no name.
    if (stream := _standard(path)) is not None or (path.exists() and not path.is_file()):
        with open(path if stream is None else stream, "wb", closefd=stream is None) as file:
            file.writelines(parts)
    else:
        replace_file(Path(os.path.realpath(path)), parts)


def open_file(path: str | Path, *, pipes: bool = False) -> BinaryIO:
    """Open a file for reading. OSError for a device, which may never end, and for a pipe.

    With `pipes`, one that a process writes to is read, as in `nhwc ops --diff <(...) new.json`;
    one without a writer is empty, and not waited for.
    """
    handle = os.open(path, _READING | _UNBLOCKED)
    kind = os.fstat(handle).st_mode
    if stat.S_ISREG(kind):
        return os.fdopen(handle, "rb")
    if pipes and stat.S_ISFIFO(kind):
        os.set_blocking(handle, True)
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is no file", str(path))


def _standard(path: Path) -> int | None:
    """Return 1 or 2 where `path` is what standard output or error leads to, as `>> log` does."""
    for stream in (1, 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(path), os.fstat(stream)):
                return stream
    return None


def why_not(error: OSError | ValueError) -> str:
    """Why a file cannot be read or written: a name with a NUL in it is an error of Python's own.

    >>> why_not(FileNotFoundError(2, "No such file or directory"))
    'No such file or directory'
    """
    return getattr(error, "strerror", None) or str(error)


def _opened(folder: Path, name: Path, mode: int) -> tuple[int, bool]:
    """Open a new file for writing, and say whether it has its name; the umask narrows `mode`."""
    if _UNNAMED:
        # Not every file system has such files, and naming one later goes through /proc.
        with contextlib.suppress(OSError):
            handle = os.open(folder, os.O_WRONLY | os.O_CLOEXEC | _UNNAMED, mode)
            if os.path.exists(_link_to(handle)):
                return handle, False
            os.close(handle)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    flags |= getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    return os.open(name, flags, mode), True


def _give_name(handle: int, name: Path) -> None:
    # Only with a folder's descriptor does Python ask for the link to be followed.
    folder = os.open(name.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.link(_link_to(handle), name, src_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def _link_to(handle: int) -> str:
    return f"/proc/self/fd/{handle}"
