"""Results that show themselves: to a notebook as a page, to `print` as the command line's text.

This room stands below all results and cannot know what they look like. `render` stands above them,
and says it once for each type.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any


@singledispatch
def html_of(result: object) -> str | None:
    """What a notebook shows of `result`; None where nobody has said what it looks like."""
    return None


@singledispatch
def text_of(result: object) -> str | None:
    """What `print` and IPython show of `result`; None where nobody has said it."""
    return None


class Displayed:
    """A result that shows itself, printed or as the last value of a cell."""

    def __str__(self) -> str:
        return text_of(self) or repr(self)

    def _repr_html_(self) -> str | None:
        return html_of(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        # IPython would prefer the __repr__ of a dataclass to a method of its own kind.
        text = text_of(self)
        return {} if text is None else {"text/plain": text}
