"""Packages that are no part of nhwc: missed before the work, once, with what to install."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..benchmark.engines import find_engine
from ..errors import missing
from .progress import note


def check_models(names: Iterable[str]) -> None:
    """Refuse models whose package is not installed."""
    for name in names:
        if Path(name).exists():
            continue
        sources = _sources(name)
        if sources and not any(map(_installed, sources)):
            raise missing(f"{' or '.join(sources)}, which {name} is from,", "zoo")


def note_missing(variants: Sequence[str]) -> None:
    """Say which engines are left out for want of a package."""
    extras: dict[str, list[str]] = {}
    for engine in map(find_engine, variants):
        if engine.missing:
            extras.setdefault(engine.extra, []).append(engine.label)
    for extra, labels in extras.items():
        note(f"left out, not installed: {', '.join(labels)}; pip install 'nhwc[{extra}]'")


def _sources(name: str) -> tuple[str, ...]:
    """The packages that may have the model, one of which is enough."""
    where, colon, _ = name.rpartition(":")
    if not colon:
        return ("torchvision", "timm")
    return (where,) if where in ("torchvision", "timm") else ()


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
