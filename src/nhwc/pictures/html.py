"""A tensor's memory as HTML: a drawing with styles of its own, for a page or a notebook's cell."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from .memory import Cell, Memory, Panel

HUES = 8
SHADES = 6


def memory_html(memory: Memory) -> str:
    """Draw a tensor on its own, with the styles that the drawing needs.

    >>> import torch
    >>> from .memory import memory_of
    >>> memory_html(memory_of(torch.empty(2, 3, 4, 4))).startswith("<div")
    True
    """
    return f"{memory_fragment(memory)}<style>{memory_styles()}</style>"


def memory_styles() -> str:
    """The styles of a drawing; none of them reaches what is not part of it."""
    return files(__package__).joinpath("memory.css").read_text(encoding="utf-8")


def memory_fragment(memory: Memory) -> str:
    """Draw a tensor for a page that has the styles already."""
    parts = [_head(memory)]
    if memory.axes:
        parts.append(_strides(memory))
    if memory.cells:
        parts.append(f'<div class="m-grids">{_shelves(memory)}</div>{_label("storage")}')
        parts.append(f'<div class="m-strip">{_strip(memory)}</div>')
    parts += [f'<div class="m-note">{escape(line)}</div>' for line in memory.words]
    return f'<div class="nhwc-memory">{"".join(parts)}</div>'


def _head(memory: Memory) -> str:
    shape = "&#8239;×&#8239;".join(map(str, memory.shape)) or "one number"
    format = _span(f"m-format m-{memory.format}", str(memory.format).replace("_", " "))
    facts = _span("m-soft", f"{memory.dtype} on {memory.device}")
    return f'<div class="m-head"><b>{shape}</b>{format}{facts}</div>'


def _label(text: str) -> str:
    return f'<div class="m-label">{escape(text)}</div>' if text else ""


def _span(kind: str, text: str) -> str:
    return f'<span class="{kind}">{escape(text)}</span>'


def _strides(memory: Memory) -> str:
    steps = "".join(
        f'<span class="m-stride">{_span("m-soft", axis.name)} {axis.stride}</span>'
        for axis in memory.axes
    )
    return f'<div class="m-strides"><span class="m-label">strides</span>{steps}</div>'


def _shelves(memory: Memory) -> str:
    shelves = []
    for shelf in memory.shelves:
        panels = "".join(_panel(panel, memory) for panel in shelf.panels)
        shelves.append(f'<div>{_label(shelf.title)}<div class="m-panels">{panels}</div></div>')
    return "".join(shelves)


def _panel(panel: Panel, memory: Memory) -> str:
    cells = ("".join(_cell([cell], memory) for cell in row) for row in panel.rows)
    rows = "".join(f'<div class="m-row">{row}</div>' for row in cells)
    return f'<div class="m-panel">{_label(panel.title)}{rows}</div>'


def _strip(memory: Memory) -> str:
    """The storage: every run of places begins with the number of its first."""
    runs = [_cut(memory.runs[0].place)]
    for run, next_run in zip(memory.runs, (*memory.runs[1:], None), strict=True):
        end = run.place + len(run.cells)
        cells = "".join(_cell(cells, memory) for cells in run.cells)
        cut = _cut(next_run.place - end) if next_run else ""
        place = _span("m-place", str(run.place))
        runs.append(f'<span class="m-run">{place}<span class="m-row">{cells}{cut}</span></span>')
    return "".join(runs)


def _cut(places: int) -> str:
    """The mark of places that are left out."""
    return f'<span class="m-cut" title="{places} more">⋯</span>' if places else ""


def _cell(cells: Sequence[Cell], memory: Memory) -> str:
    if not cells:
        return '<span class="m-hole" title="not a place of this tensor"></span>'
    cell = cells[0]
    numbers = " ".join(str(shared.number) for shared in cells)
    shade = min(SHADES - 1, int(cell.shade * SHADES))
    index = ", ".join(f"{a.name} {i}" for a, i in zip(memory.axes, cell.index, strict=True))
    several = f" and {len(cells) - 1} more" if len(cells) > 1 else ""
    title = f"number {cell.number} ({index}{several}) in place {cell.place}"
    return (
        f'<span class="m-cell m-h{cell.hue % HUES} m-s{shade}" data-n="{numbers}" '
        f'title="{title}">{cell.number}</span>'
    )
