"""A benchmark as a picture: bars with intervals, sorted; ours coloured, everything else grey."""

from __future__ import annotations

import io
import textwrap
import warnings
from itertools import groupby
from typing import Any

from .._bench import Benchmark, Case, Row
from .._bench.engines import find_engine
from ..errors import InputError, missing
from ..machine.timing import Comparison
from ..shown import printable
from . import bench_words as words

OURS, OURS_LIGHT = "#0e8f84", "#79c3bb"
PLAIN, PEER = "#64748b", "#b6bec9"
BAND, BAND_TEXT = "#fde9c8", "#a16207"
INK, FAINT = "#1e293b", "#64748b"

_STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.edgecolor": "#cbd5e1",
    "xtick.color": FAINT,
    "ytick.color": INK,
    "svg.hashsalt": "nhwc",
    "text.parse_math": False,
}

Bar = tuple[str, float, Comparison, str, str]
"""A bar: its name, place on the y axis, comparison, colour, and the text at its end."""


def bench_plot(result: Benchmark, format: str = "svg") -> bytes:
    """Draw the result as `svg` or `png`: variants for one case, cases in groups for many."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise missing("matplotlib", "plot") from None
    rows = [row for row in result.rows if row.measurement(result.baseline)]
    if not rows:
        raise InputError(
            f"{words.label(result.baseline)} was not measured, and speeds are drawn against it. "
            f"Add {result.baseline} to the variants."
        )
    with matplotlib.rc_context(_STYLE):
        panels = _panels(rows)
        tallest = max(len(_bars(panel, result)) for panel in panels)
        single = len(rows) == 1
        height = 2.3 + (0.42 * tallest if single else 0.14 * (tallest + len(rows) / len(panels)))
        width = 4.6 + 4.8 * len(panels)
        figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
        axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axis, panel in zip(axes, panels, strict=True):
            _draw(axis, panel, result, several=len(rows) > 1)
        _frame(figure, result, rows, height)
        data = io.BytesIO()
        with warnings.catch_warnings():
            # A font may lack a letter of a model's name.
            warnings.filterwarnings("ignore", "Glyph")
            figure.savefig(
                data, format=format, metadata={"Date": None} if format == "svg" else None
            )
    return data.getvalue()


def _panels(rows: list[Row]) -> list[list[Row]]:
    """Suites get a panel per batch and thread count; a sweep of one model is one panel."""
    if len({row.case.model for row in rows}) < 2:
        return [rows]

    def setting(row: Row) -> tuple[int, int]:
        return row.case.batch, row.case.threads

    return [list(group) for _, group in groupby(sorted(rows, key=setting), key=setting)]


def _bars(panel: list[Row], result: Benchmark) -> list[Bar]:
    """Lay out the bars from bottom to top: by speed, or in a sweep by falling batch size."""
    if len(panel) == 1:
        return _one(panel[0], result.baseline)
    cases = [row.case for row in panel]
    same_model = len({case.model for case in cases}) < 2
    key = (lambda row: -row.case.batch) if same_model else (lambda row: _gain(row, result.baseline))
    bars: list[Bar] = []
    place = 0.0
    for row in sorted(panel, key=key):
        group = _group(row, result.baseline)
        for position, (comparison, colour, text) in enumerate(group):
            named = position == (len(group) - 1) // 2
            name = _end_of(words.short(row.case, cases)) if named else ""
            bars.append((name, place, comparison, colour, text))
            place += 1.0
        place += 1.0
    return bars


def _end_of(name: str) -> str:
    """A name, or its end: a path may be wider than the picture."""
    return name if len(name) <= 48 else f"...{name[-45:]}"


def _one(row: Row, baseline: str) -> list[Bar]:
    bars: list[Bar] = []
    slowest_first = sorted(row.measured, key=lambda m: -m.median_s)
    slowest_first = [m for m in slowest_first if row.shown(m.variant, baseline)]
    for place, m in enumerate(slowest_first):
        found = row.shown(m.variant, baseline)
        assert found is not None
        text = f"{words.times(found.ratio)}   {words.bare_ms(m.median_s)} ms"
        bars.append((words.label(m.variant), float(place), found, _colour(m.variant), text))
    return bars


def _group(row: Row, baseline: str) -> list[tuple[Comparison, str, str]]:
    """The plain recipe, the best of the others by name, and the best of ours on top."""
    if row.isolates:
        return _steps(row)
    chosen = []
    plain, peer, own = "channels_last", row.best(ours=False), row.best(ours=True)
    for variant, colour in (
        (plain, PLAIN),
        (peer.variant if peer and peer.variant not in (plain, baseline) else "", PEER),
        (own.variant if own else "", OURS),
    ):
        found = row.comparison(variant, baseline) if variant else None
        if found:
            name = f" {words.label(variant)}" if colour == PEER else ""
            chosen.append((found, colour, words.times(found.ratio) + name))
    return chosen


def _steps(row: Row) -> list[tuple[Comparison, str, str]]:
    """What folding gains in each layout, each against the same layout."""
    chosen = []
    for variant in ("fused", "fused_nchw"):
        found = row.gain(variant)
        if found:
            text = f"{words.times(found.ratio)} {words.step(variant)}"
            chosen.append((found, _colour(variant), text))
    return chosen


def _gain(row: Row, baseline: str) -> float:
    best = row.best(ours=True) or row.measurement("channels_last")
    found = row.comparison(best.variant, baseline) if best else None
    return found.ratio if found else 0.0


def _colour(variant: str) -> str:
    colours = {"ours": OURS, "fuse": OURS_LIGHT, "torch": PLAIN, "peer": PEER}
    return colours[words.kind(find_engine(variant))]


def _draw(axis: Any, panel: list[Row], result: Benchmark, *, several: bool) -> None:
    bars = _bars(panel, result)
    single = len(panel) == 1
    longest = max([1.0, *(bar[2].ratio for bar in bars)])
    # A noisy interval may be a hundred bars long: beside it they would be too short to see.
    reach = min(2 * longest, max([longest, *(bar[2].interval[1] for bar in bars)]))
    published = panel[0].published
    if published and published.low and published.high:
        axis.axvspan(published.low, max(published.high, published.low + 0.01), color=BAND, zorder=0)
        reach = max(reach, published.high)
        text = f"published for channels last: {published}"
        axis.text(
            published.low, 1.0, text, transform=axis.get_xaxis_transform(),
            color=BAND_TEXT, fontsize=8, va="bottom",
        )  # fmt: skip
    for _, place, found, colour, text in bars:
        low, high = found.interval
        axis.barh(place, found.ratio, height=0.66 if single else 0.9, color=colour, zorder=2)
        if found.before is not found.after and (low, high) != (1.0, 1.0):
            # An arrow says that the interval goes on; the line itself would run through the text.
            tip = {"marker": ">", "markevery": [-1], "ms": 3.5} if high > reach else {}
            high = min(high, reach)
            axis.plot([low, high], [place, place], color=INK, lw=1.1, zorder=3, **tip)
        axis.text(
            max(high, found.ratio) + 0.015 * reach, place, text, va="center",
            fontsize=9 if single else 7, color=INK if colour == OURS else FAINT, zorder=4,
            bbox={"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.6},
        )  # fmt: skip
    axis.axvline(1.0, color=INK, lw=0.8, ls=(0, (2, 2)), zorder=1)
    axis.set_yticks([bar[1] for bar in bars if bar[0]], [bar[0] for bar in bars if bar[0]])
    axis.tick_params(length=0)
    axis.set_xlim(0, reach * (1.22 if single else 1.3))
    places = [bar[1] for bar in bars] or [0.0]
    axis.set_ylim(min(places) - 0.8, max(places) + 0.8)
    axis.grid(axis="x", color="#eef2f6", zorder=0)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    steps = not single and all(row.isolates for row in panel)
    against = "the same layout without the step" if steps else words.label(result.baseline)
    axis.set_xlabel(f"times as fast as {against}")
    if several:
        axis.set_title(_setting(panel), loc="left", fontsize=10, color=FAINT, pad=16)


def _setting(panel: list[Row]) -> str:
    """What all bars have in common: their model, too, where it names none of them."""
    cases = [row.case for row in panel]
    model = f"{_end_of(cases[0].model)}, " if len(cases) == 1 else ""
    return printable(model + words.common(cases), keep="")


def _frame(figure: Any, result: Benchmark, rows: list[Row], height: float) -> None:
    """Title above, machine and versions underneath."""
    cases = [row.case for row in rows]
    single = len(cases) == 1
    title = textwrap.wrap(_title(result, cases), int(7.5 * figure.get_figwidth()))
    below = 0.28 + 0.22 * len(title)
    top, bottom = (below + 0.3) / height, 0.4 / height
    head = "\n".join(title)
    figure.text(0.02, 1 - 0.22 / height, head, fontsize=13, weight="bold", va="top")
    figure.text(0.02, 1 - below / height, _legend(rows), fontsize=8.5, color=FAINT, va="top")
    machine = printable(words.environment(result), keep="")
    foot = "\n".join(textwrap.wrap(machine, 120 if single else 190))
    figure.text(0.02, 0.12 / height, foot, fontsize=7.5, color=FAINT, va="bottom")
    layout: Any = figure.get_layout_engine()
    layout.set(rect=(0.01, bottom, 0.97, 1 - top - bottom), wspace=0.05)


def _title(result: Benchmark, cases: list[Case]) -> str:
    if len(cases) == 1:
        title = f"{cases[0].model}, {words.common(cases)}"
    else:
        same = len({case.model for case in cases}) == 1
        title = result.title or (cases[0].model if same else "nhwc bench")
    # Whatever a file says: an escape sequence is no character of an SVG, which then is none.
    return printable(title, keep="")


def _legend(rows: list[Row]) -> str:
    if len(rows) == 1:
        return "longer is faster; lines are 99 % intervals; measured in turns, a process each"
    if all(row.isolates for row in rows):
        return "what folding alone gains; lines are 99 % intervals; measured in turns"
    return (
        "per row: nhwc (green), the best of the others (light grey), plain channels last (dark "
        "grey); lines are 99 % intervals"
    )
