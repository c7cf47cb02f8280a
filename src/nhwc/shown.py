"""Text that others wrote, made fit to be shown: names of modules, lines of source, words of files.

A terminal obeys some characters, and a reader is misled by others: escape sequences move the cursor
and recolour what stands there, and marks of direction turn a name around. They are shown by their
numbers, as Python shows them in a string.
"""

from __future__ import annotations

import unicodedata

_OBEYED = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""What Unicode calls control and format characters, surrogates, and separators of lines."""

_LENGTH = 300
"""So much of an error's text is shown: it may quote a file."""


def printable(text: str, keep: str = "\n\t") -> str:
    r"""`text` with every character shown that a terminal would obey, but those in `keep`.

    >>> print(printable("conv\x1b[2J"))
    conv\x1b[2J
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c in keep or not _is_obeyed(c) else _written(c) for c in text)


def shown(error: BaseException | str) -> str:
    r"""What an error says, in one line of a length that can be read.

    >>> shown(ValueError("no\nsuch\x1b[2J"))
    'no such\\x1b[2J'
    """
    line = printable(" ".join(str(error).split()), keep="")
    return line if len(line) <= _LENGTH else f"{line[: _LENGTH - 3]}..."


def _is_obeyed(character: str) -> bool:
    return unicodedata.category(character) in _OBEYED


def _written(character: str) -> str:
    return character.encode("unicode_escape").decode()
