"""Functions that the text renderers share: colour, wrapping, units."""

from __future__ import annotations

import re
import shutil
import textwrap

from ..shown import printable

_WIDTH = 96

_CODES = {"red": "31;1", "yellow": "33;1", "green": "32;1", "blue": "36", "dim": "2", "bold": "1"}

_PAINTED = re.compile("(" + "|".join(rf"\033\[{code}m" for code in (*_CODES.values(), "0")) + ")")


def paint(text: str, color: str, enabled: bool) -> str:
    """Colour `text` for a terminal, or leave it."""
    return f"\033[{_CODES[color]}m{text}\033[0m" if enabled else text


def to_show(text: str) -> str:
    r"""Escape all control characters in `text`, except the colours of `paint`.

    >>> to_show(paint("conv\x1b[2J", "red", True))
    '\x1b[31;1mconv\\x1b[2J\x1b[0m'
    """
    parts = _PAINTED.split(text)
    return "".join(part if i % 2 else printable(part) for i, part in enumerate(parts))


def wrap(text: str, indent: str, further: str | None = None) -> str:
    """Break `text` at the terminal's width; lines after the first begin with `further`.

    A longer word stays whole: it may be a path.
    """
    further = indent if further is None else further
    return textwrap.fill(
        text,
        width(),
        initial_indent=indent,
        subsequent_indent=further,
        break_long_words=False,
    )


def width() -> int:
    """The width of the terminal, but at most `_WIDTH`, which is also the width without one."""
    return min(_WIDTH, shutil.get_terminal_size((_WIDTH, 24)).columns)


def milliseconds(seconds: float) -> str:
    """Format a time in milliseconds, with three significant digits where it has two decimals.

    >>> milliseconds(0.0123456), milliseconds(0.1234), milliseconds(0.0000056)
    ('12.3 ms', '123 ms', '0.006 ms')
    """
    ms = seconds * 1e3
    decimals = 0 if ms >= 100 else 1 if ms >= 10 else 2 if ms >= 0.01 or ms == 0 else 3
    return f"{ms:.{decimals}f} ms"


def duration(seconds: float) -> str:
    """Format a span of time for people.

    >>> duration(5), duration(90), duration(4000)
    ('5 s', '1 min 30 s', '1 h 6 min')
    """
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def size(count: int) -> str:
    """Format a number of bytes for people.

    >>> size(4_365_312)
    '4.4 MB'
    """
    amount = float(count)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"


def shape(dims: tuple[int, ...]) -> str:
    return "x".join(map(str, dims))


def plural(count: int, word: str) -> str:
    """
    >>> plural(1, "call"), plural(3, "loss")
    ('1 call', '3 losses')
    """
    ending = "" if count == 1 else "es" if word.endswith("s") else "s"
    return f"{count} {word}{ending}"
