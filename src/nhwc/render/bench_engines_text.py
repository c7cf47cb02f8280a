"""The engines that `bench` can compare: those that are installed, and how to get the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._bench.engines import Engine
from .text import wrap


def engines_text(engines: Sequence[Engine]) -> str:
    """A line for each engine, those that are installed first.

    >>> from nhwc._bench.engines import find_engine
    >>> print(engines_text([find_engine("jit")]).splitlines()[1].split("  ")[1])
    jit
    """
    here = [(engine, engine.version or f"torch {torch.__version__}") for engine in engines]
    installed = [_line(engine, version) for engine, version in here if not engine.missing]
    missing = [_line(engine, engine.pip) for engine in engines if engine.missing]
    lines = ["installed", *installed]
    if missing:
        lines += ["", "not installed", *missing]
    return "\n".join(lines) + "\n"


def missing_text(engines: Sequence[Engine]) -> str:
    """One line that names the engines that are not installed."""
    named = "; ".join(f"{engine.label} ({engine.pip})" for engine in engines)
    return f"not installed: {named}"


def _line(engine: Engine, fact: str) -> str:
    return wrap(f"{engine.name:20} {engine.label:32} {fact}", "  ", 23 * " ")
