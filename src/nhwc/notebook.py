"""How far a verb is, in a notebook; results show themselves there without help."""

from __future__ import annotations

import html
import sys
import time
from types import TracebackType
from typing import Any

from ._bench import Progress
from .render.text import duration

_EVERY_S = 0.1


class Bar:
    """A progress bar below the cell, for what takes long; gone when the work is done.

    >>> with Bar() as bar:
    ...     for done in range(3):
    ...         bar(done, 3, "grid_sample")

    Hand it to a verb: `nhwc.optimize(model, x, progress=bar)`, and so to `bench` and `ops`. Outside
    of a notebook it shows nothing.
    """

    def __init__(self) -> None:
        self._handle: Any = None
        self._began, self._last = time.monotonic(), 0.0

    def __enter__(self) -> Bar:
        if _in_notebook():
            from IPython.display import display

            self._handle = display({}, raw=True, display_id=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handle is not None:
            self._handle.update({}, raw=True)

    def __call__(self, *told: Any) -> None:
        """Draw what a verb tells of its progress, counts ten times a second at most."""
        now = time.monotonic()
        # A stage that is named once may last; a count goes on.
        counts = not isinstance(told[0], str)
        if self._handle is None or (counts and now - self._last < _EVERY_S):
            return
        self._last = now
        self._handle.update({"text/html": bar_html(*self._read(told, now))}, raw=True)

    def _read(self, told: tuple[Any, ...], now: float) -> tuple[str, float | None, float | None]:
        """What is being done, the share that is done, the seconds left; None where unknown."""
        if isinstance(told[0], Progress):
            progress = told[0]
            return f"{progress.case}: {progress.doing}", progress.share, progress.remaining_s
        if isinstance(told[0], str):
            return told[0], None, None
        done, total, title = told
        left = (now - self._began) / done * (total - done) if done else None
        return title, done / total, left


def bar_html(text: str, share: float | None, remaining_s: float | None) -> str:
    """Draw a bar in the notebook's own colours; one without a share only moves.

    >>> bar_html("conv<2>", 0.5, 90.0)
    '<progress value="0.5"></progress> 50% conv&lt;2&gt;, 1 min 30 s left'
    """
    value = "" if share is None else f' value="{share:.3g}"'
    percent = "" if share is None else f"{share:.0%} "
    left = "" if remaining_s is None else f", {duration(remaining_s)} left"
    return f"<progress{value}></progress> {percent}{html.escape(text)}{left}"


def _in_notebook() -> bool:
    """Whether a kernel runs this code: its shell can change what it has displayed."""
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive else None
    return getattr(shell, "kernel", None) is not None
