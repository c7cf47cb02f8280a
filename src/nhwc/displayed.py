"""Results that a notebook shows by themselves: as a page, or as text where there is only text.

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
    """What IPython shows of `result` on a terminal; None where nobody has said it."""
    return None


class Displayed:
    """A result that shows itself as the last value of a cell."""

    def _repr_html_(self) -> str | None:
        return html_of(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        # IPython would prefer the __repr__ of a dataclass to a method of its own kind.
        text = text_of(self)
        return {} if text is None else {"text/plain": text}
