"""The hash by which GitHub's code scanning knows a line again after it has moved."""

from __future__ import annotations

import re
from collections import Counter

_REACH = 100
"""How many characters behind the start of a line tell it from others."""

_BASE = 37
_END = "\uffff"
"""The character that stands for the end of the file."""


def line_hashes(text: str) -> list[str]:
    r"""The `primaryLocationLineHash` of every line of `text`.

    A hash covers the 100 characters from the start of the line on, those of later lines among them,
    without blanks; lines that are equal so far are numbered.

    >>> line_hashes(" a\nb\n  \t\tc\n d")[1:3]
    ['54703d4cd895b18:1', '180aee12dab6264:1']
    """
    lines = re.split(r"(?<=\n)", re.sub(r"\r\n?", "\n", text) + _END)
    bare = [re.sub("[ \t]", "", line) for line in lines]
    units = [_utf16("".join(bare[at : at + _REACH])[:_REACH]) for at in range(len(bare))]
    seen: Counter[str] = Counter()
    found = []
    for codes in units:
        value = 0
        for code in (codes + [0] * _REACH)[:_REACH]:
            value = (value * _BASE + code) % 2**64
        seen[f"{value:x}"] += 1
        found.append(f"{value:x}:{seen[f'{value:x}']}")
    return found


def _utf16(text: str) -> list[int]:
    data = text.encode("utf-16-le", "surrogatepass")
    return [int.from_bytes(data[at : at + 2], "little") for at in range(0, len(data), 2)]
