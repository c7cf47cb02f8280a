"""What a command says: output on stdout; notes and how far the work is on stderr."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
import time
from typing import TextIO

from ..errors import InputError
from ..render.text import duration, to_show
from ..shown import obeys, printable

_OF_UTF_8 = ("<!doctype html>", "<?xml")
"""How documents begin that say of themselves that they are UTF-8, whatever the locale is."""


def note(text: str) -> None:
    """Print a note about the work on stderr; stdout is for data."""
    say(to_show(text) + "\n")


def say(text: str) -> None:
    """Write to stderr; if that is full or gone, the work goes on without a word."""
    try:
        sys.stderr.write(_spelt(text, sys.stderr))
        sys.stderr.flush()
    except OSError:
        drop(sys.stderr)


_PLAIN = str.maketrans("█░·⋯", "#-.~")
"""What bars and pictures of memory are made of, for a locale that lacks it."""


def _spelt(text: str, stream: TextIO) -> str:
    """`text` as a stream can write it; other characters that its locale lacks are escaped."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate(_PLAIN)
    return text.encode(encoding, "backslashreplace").decode(encoding)


def put(text: str) -> None:
    """Print a piece of output on stdout; raise InputError where that cannot be written to.

    If its reader has gone (`nhwc audit ... | head`, a terminal that was closed), the work goes on
    without a word: a verdict is still to be told by the exit status, and a model to be trained.
    """
    text = text if text.endswith("\n") else f"{text}\n"
    try:
        if text.startswith(_OF_UTF_8) and hasattr(sys.stdout, "buffer"):
            sys.stdout.flush()
            sys.stdout.buffer.write(text.encode(errors="backslashreplace"))
        else:
            sys.stdout.write(_spelt(text, sys.stdout))
        sys.stdout.flush()
    except BrokenPipeError:
        drop(sys.stdout)
    except OSError as error:
        hung_up = error.errno == errno.EIO and _is_device(sys.stdout)
        drop(sys.stdout)
        if hung_up:
            return
        raise InputError(
            f"cannot write to standard output: {error.strerror or error}. Name a file: -o FILE."
        ) from None


def _is_device(stream: TextIO) -> bool:
    return stat.S_ISCHR(os.fstat(stream.fileno()).st_mode)


def drop(stream: TextIO) -> None:
    """Lead what is still to be written nowhere: the interpreter would try again as it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class ProgressLine:
    """One line that rewrites itself on a terminal; elsewhere a plain line now and then.

    `update` may be called as often as one likes: it draws ten times a second at most.
    """

    def __init__(self, every_s: float = 30.0) -> None:
        self._live = obeys(sys.stderr)
        self._every_s = 0.1 if self._live else every_s
        self._last = -1e9 if self._live else time.monotonic()

    def update(self, text: str, share: float, remaining_s: float | None) -> None:
        now = time.monotonic()
        if now - self._last < self._every_s:
            return
        self._last = now
        text = printable(text, keep="")
        left = "" if remaining_s is None else f", {duration(remaining_s)} left"
        done = round(20 * share)
        bar = "█" * done + "░" * (20 - done)
        line = f"{bar} {share:4.0%} {text}{left}" if self._live else f"{share:4.0%} {text}{left}"
        wide = shutil.get_terminal_size().columns - 1
        say(f"\r\x1b[K{line[:wide]}" if self._live else line + "\n")

    def clear(self) -> None:
        """Erase the line, so that the next output stands alone."""
        if self._live:
            say("\r\x1b[K")
