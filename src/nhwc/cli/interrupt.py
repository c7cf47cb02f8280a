"""SIGTERM and Ctrl-C as a question that long work may ask, so that it can end well."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

from ..errors import ProcessLost


class Interrupt:
    """Within it a first signal makes calls of this object return true; a second one interrupts."""

    def __init__(self) -> None:
        self._number = 0
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self._number > 0

    @property
    def status(self) -> int:
        """The exit status that says which signal it was; SIGTERM if another process got it."""
        return 128 + (self._number or signal.SIGTERM)

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, ProcessLost):
            # Torchrun ends those that are left; this one ends anyway, and has to say why.
            self._before[signal.SIGTERM] = signal.SIG_IGN
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._number:
            raise KeyboardInterrupt
        self._number = number
