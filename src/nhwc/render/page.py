"""One self-contained page: a template, the house's style, and the data, in one file."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from typing import Any


def page(name: str, title: str, data: Any) -> str:
    """Fill `templates/NAME.html` with the style, the script, the title and the data as JSON."""
    folder = files(__package__) / "templates"

    def read(file: str) -> str:
        return (folder / file).read_text(encoding="utf-8")

    # "</script>" inside a string would end the block that holds the data.
    payload = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return (
        read(f"{name}.html")
        .replace("{{title}}", html.escape(title))
        .replace("{{style}}", read("base.css") + read(f"{name}.css"))
        .replace("{{script}}", read("base.js") + read(f"{name}.js"))
        .replace("{{data}}", payload)
    )
