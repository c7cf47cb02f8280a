"""Ctrl-C while modules are imported; signals that end long work with what is done so far."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from ..errors import ProcessLost


@contextlib.contextmanager
def ends_at_once() -> Iterator[None]:
    """In this context Ctrl-C ends the process at once, with one line.

    Use it for imports: there is nothing to save yet, and an exception raised in the middle of a
    library's own import may be swallowed there, or come out as another.
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"interrupted\n")
    os._exit(128 + number)


def ending() -> list[int]:
    """The signals that end long work besides Ctrl-C: SIGTERM, and SIGHUP of a closed terminal.

    `nohup` ignores the latter, and what is ignored stays so.
    """
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none.
    heard = hangup is not None and signal.getsignal(hangup) is not signal.SIG_IGN
    return [signal.SIGTERM, hangup] if heard and hangup else [signal.SIGTERM]


@contextlib.contextmanager
def ends_as_ctrl_c() -> Iterator[None]:
    """In this context the signals of `ending` raise KeyboardInterrupt."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in ending()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Interrupt:
    """In this context a first signal makes calls of the object true; a second one interrupts."""

    def __init__(self) -> None:
        self._number = 0
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self._number > 0

    @property
    def status(self) -> int:
        """The exit status for the signal that came, or for SIGTERM if another process got it."""
        return 128 + (self._number or signal.SIGTERM)

    def __enter__(self) -> Interrupt:
        for number in (*ending(), signal.SIGINT):
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, ProcessLost):
            # Torchrun sends SIGTERM to the rest; this one is ending anyway, and must still say why.
            self._before[signal.SIGTERM] = signal.SIG_IGN
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._number:
            raise KeyboardInterrupt
        self._number = number
