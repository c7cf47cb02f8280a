"""Types for numbers on the command line, which refuse useless ones before any work."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

SEEDS = 2**63 - 1
MANY = 1 << 30
"""More batches or epochs than anyone lives to see."""

MOST = 1024
"""More threads or processes than this exhaust a system before they are of use."""


def whole(least: int, most: int) -> Callable[[str], int]:
    """A type for argparse: whole numbers from `least` to `most`.

    >>> whole(0, 10)("7")
    7
    """

    def read(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d{1,30}", text, re.ASCII):
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number")
        return int(_within(int(text), least, most))

    return read


def number(least: float, most: float) -> Callable[[str], float]:
    """A type for argparse: numbers from `least` to `most`.

    >>> number(0.1, 10)("0.5")
    0.5
    """

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if math.isnan(value):
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number")
        return _within(value, least, most)

    return read


class Names(tuple[str, ...]):
    """A type for argparse: some of these names with commas between, which shells complete.

    >>> Names(("eager", "fused"))("fused,eager")
    'fused,eager'
    """

    def __call__(self, text: str) -> str:
        return text


def _within(value: float, least: float, most: float) -> float:
    if value < least:
        raise argparse.ArgumentTypeError(f"{value} is too small, use {least} or more")
    if value > most:
        raise argparse.ArgumentTypeError(f"{value} is too large, use {most} or less")
    return value
