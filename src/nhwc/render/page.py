"""One self-contained page: a template, the house's style, and the data, in one file."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any


def page(name: str, title: str, data: Any, folder: Path | None = None) -> str:
    """Build a page from NAME.html, in `folder` or our templates, with style, script and data."""
    house = files(__package__) / "templates"

    def read(file: str) -> str:
        room = house if folder is None or file.startswith("base.") else folder
        return (room / file).read_text(encoding="utf-8")

    # A tag inside a string could end the block that holds the data, or keep it from ending.
    payload = json.dumps(_plain(data), separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "title": html.escape(title),
        "body": read(f"{name}.html").strip(),
        "style": read("base.css") + read(f"{name}.css"),
        "script": read("base.js") + read(f"{name}.js"),
        "data": payload,
    }
    # Replace all in one go: a model may be called {{data}}.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], read("base.html"))


def _plain(value: Any) -> Any:
    """Replace NaN and infinities in `value` by None, because JSON cannot express them."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
