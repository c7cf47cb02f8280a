"""Text that others wrote, made fit to be shown: names of modules, lines of source, words of files.

A terminal obeys some characters, and a reader is misled by others: escape sequences move the cursor
and recolour what stands there, and marks of direction turn a name around. Such characters are shown
escaped, as Python shows them in a string.
"""

from __future__ import annotations

import os
import re
import unicodedata
from typing import TextIO

_OBEYED = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
"""Unicode categories: control, format, surrogate, private use, unknown to this Python, line and
paragraph separators."""

_COLOURS = re.compile(r"\x1b\[[\d;]*m")
"""What a terminal is told to colour what follows: it says nothing, and is left out of errors."""

_LENGTH = 300
"""The most characters of an error's text that are shown: it may quote a whole file."""


def printable(text: str, keep: str = "\n\t") -> str:
    r"""`text` with every character escaped that a terminal would obey, except those in `keep`.

    >>> print(printable("conv\x1b[2J"))
    conv\x1b[2J
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in keep or not _is_obeyed(c) else _written(c) for c in text)


def shown(error: BaseException | str) -> str:
    r"""The text of an error in one line, escaped, not coloured, and of a length that can be read.

    >>> shown(ValueError("no\nsuch\x1b[2J"))
    'no such\\x1b[2J'
    >>> shown("\x1b[96mstep 1\x1b[0m failed")
    'step 1 failed'
    """
    line = printable(" ".join(_COLOURS.sub("", str(error)).split()), keep="")
    return line if len(line) <= _LENGTH else f"{line[: _LENGTH - 3]}..."


def first_line(error: BaseException) -> str:
    r"""The first line of an error's text, or its kind where it has none.

    >>> first_line(ValueError("no\nsuch")), first_line(AssertionError())
    ('no', 'AssertionError')
    """
    return shown(str(error).strip().partition("\n")[0]) or type(error).__name__


def misfit(error: BaseException) -> str:
    r"""The last of what torch says against a state dict, whose names may hold ends of lines.

    >>> misfit(RuntimeError('Error(s):\n\tMissing key(s): "a". \n\tUnexpected key(s): "b\nc". '))
    'Unexpected key(s): "b c".'
    """
    return shown(str(error).strip().rpartition("\n\t")[2])


def described(value: object) -> str:
    """How `value` describes itself, or its class where that raises, as code of users may."""
    try:
        return repr(value)
    except Exception:
        return type(value).__name__


def obeys(stream: TextIO) -> bool:
    """Whether `stream` is a terminal that obeys escape sequences, which TERM=dumb denies."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def is_coloured(stream: TextIO) -> bool:
    """Whether to colour what goes to `stream`: NO_COLOR asks for none."""
    return obeys(stream) and not os.environ.get("NO_COLOR")


def _is_obeyed(character: str) -> bool:
    return unicodedata.category(character) in _OBEYED


def _written(character: str) -> str:
    return character.encode("unicode_escape").decode()
