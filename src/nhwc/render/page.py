"""One self-contained page: a template, the house's style, and the data, in one file."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from pathlib import Path
from typing import Any


def page(name: str, title: str, data: Any, folder: Path | None = None) -> str:
    """Put NAME.html, from `folder` or the house's, into its page, with style, script and data."""
    house = files(__package__) / "templates"

    def read(file: str) -> str:
        room = house if folder is None or file.startswith("base.") else folder
        return (room / file).read_text(encoding="utf-8")

    # "</script>" inside a string would end the block that holds the data.
    payload = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return (
        read("base.html")
        .replace("{{title}}", html.escape(title))
        .replace("{{body}}", read(f"{name}.html").strip())
        .replace("{{style}}", read("base.css") + read(f"{name}.css"))
        .replace("{{script}}", read("base.js") + read(f"{name}.js"))
        .replace("{{data}}", payload)
    )
