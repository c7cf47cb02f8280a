"""A tensor's memory in a terminal: the numbers by their indices, then by their places."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Sequence

from .memory import Cell, Memory, Panel

WIDTH = 96

_TONES = (
    (224, 217, 210), (194, 157, 120), (189, 153, 111), (229, 222, 220),
    (183, 177, 141), (159, 123, 87), (225, 218, 212), (193, 191, 155),
)  # fmt: skip
"""For each channel three of a terminal's 256 colours, from light to dark; all bear black text."""

_WIDTH = 3
"""The characters of a number."""

_HOLE = "  ·"
_CUT = "  ⋯"


def memory_text(memory: Memory, *, color: bool = False) -> str:
    """Draw a tensor in lines of text, as the example of `show` has it."""
    wide = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    shape = "x".join(map(str, memory.shape)) or "a single number,"
    lines = textwrap.wrap(f"{shape} {memory.dtype}, {memory.format}, on {memory.device}", wide)
    if memory.axes:
        steps = (f"{axis.name}{':' * (' ' in axis.name)} {axis.stride}" for axis in memory.axes)
        lines.append(f"strides  {'   '.join(steps)}")
    if memory.cells:
        lines += ["", *_shelves(memory, wide, color), *_storage(memory, wide, color)]
    return "\n".join([*lines, "", *textwrap.wrap(" ".join(memory.words), wide)]).rstrip()


def _shelves(memory: Memory, wide: int, color: bool) -> Iterator[str]:
    for shelf in memory.shelves:
        if shelf.title:
            yield shelf.title
        width = max(len(panel.title) for panel in shelf.panels)
        width = max(width, _WIDTH * len(shelf.panels[0].rows[0]))
        room = max(1, wide // (width + 2))
        for start in range(0, len(shelf.panels), room):
            yield from _beside(shelf.panels[start : start + room], width, color)
        yield ""


def _beside(panels: Sequence[Panel], width: int, color: bool) -> Iterator[str]:
    titles = "".join(f"  {panel.title:<{width}}" for panel in panels).rstrip()
    if titles:
        yield titles
    for row in range(len(panels[0].rows)):
        line = ""
        for panel in panels:
            pad = " " * (width - _WIDTH * len(panel.rows[row]))
            line += f"  {''.join(_drawn([cell], color) for cell in panel.rows[row])}{pad}"
        yield line.rstrip()


def _storage(memory: Memory, wide: int, color: bool) -> Iterator[str]:
    """The places, as many in a line as fit; a line begins with the place of its first number."""
    room = (wide - 2) // _WIDTH
    lines: list[tuple[int, list[str]]] = []
    for run in memory.runs:
        if lines:
            lines[-1][1].append(_CUT)
        for place, cells in enumerate(run.cells, run.place):
            # One more may follow in the line: the mark of what is left out.
            if not lines or len(lines[-1][1]) >= room - 1:
                lines.append((place, []))
            lines[-1][1].append(_drawn(cells, color))
    for first, parts in lines:
        yield from (f"place {first}", f"  {''.join(parts)}")


def _drawn(cells: Sequence[Cell], color: bool) -> str:
    if not cells:
        return _HOLE
    cell = cells[0]
    text = f"{cell.number:>{_WIDTH}}"
    if not color:
        return text
    tones = _TONES[cell.hue % len(_TONES)]
    tone = tones[min(len(tones) - 1, int(cell.shade * len(tones)))]
    return f"\033[30;48;5;{tone}m{text}\033[0m"
