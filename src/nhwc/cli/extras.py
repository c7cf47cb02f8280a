"""Optional packages: looked for before the work begins; an error says what to install."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from ..errors import missing


def check_models(names: Iterable[str]) -> None:
    """Refuse models whose package is not installed."""
    for name in names:
        if Path(name).exists():
            continue
        sources = _sources(name)
        if sources and not any(map(_installed, sources)):
            raise missing(f"{' or '.join(sources)}, which {name} is from,", "zoo")


def _sources(name: str) -> tuple[str, ...]:
    """The packages that may have the model; any one of them is enough."""
    where, colon, _ = name.rpartition(":")
    if not colon:
        return ("torchvision", "timm")
    return (where,) if where in ("torchvision", "timm") else ()


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
