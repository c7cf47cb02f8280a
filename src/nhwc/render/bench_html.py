"""A benchmark as one self-contained page: the answer, the picture, every number."""

from __future__ import annotations

import html
import re
from importlib.resources import files
from string import Template

from ..benchmark import Benchmark, Measurement, Row
from ..errors import MissingPackage
from . import bench_words as words
from .bench_plot import bench_plot

_HEAD = ("variant", "ms", "quartiles", "images/s", "speed", "99 % sure", "verdict")
_HEAD_MORE = ("set-up s", "peak MB", "error")


def bench_html(result: Benchmark) -> str:
    """Fill the page; without matplotlib it has no picture, and says so."""
    page = Template((files(__package__) / "templates" / "bench.html").read_text("utf-8"))
    title = result.title or ", ".join(dict.fromkeys(row.case.model for row in result.rows))
    return page.substitute(
        title=html.escape(f"nhwc bench: {title}"),
        heading=html.escape(title),
        answer=_paragraphs(_answers(result)),
        picture=_picture(result),
        tables="\n".join(_section(row, result.baseline) for row in result.rows),
        problems=_problems(result),
        environment=html.escape(words.environment(result)),
    )


def _answers(result: Benchmark) -> list[str]:
    if len(result.rows) == 1:
        lines = [words.answer(result.rows[0], result.baseline)]
    else:
        lines = [
            f"{words.label(variant)}: {words.times(result.geometric_mean(variant))} "
            f"{words.label(result.baseline)} (geometric mean)"
            for variant in result.variants
            if variant != result.baseline and result.geometric_mean(variant) > 0
        ]
    if result.interrupted:
        lines.append("Interrupted: this is what was measured until then.")
    return [line for line in lines if line]


def _paragraphs(lines: list[str]) -> str:
    return "\n".join(f"<p>{html.escape(line)}</p>" for line in lines)


def _picture(result: Benchmark) -> str:
    try:
        drawn = bench_plot(result, "svg").decode()
    except MissingPackage as error:
        return f"<p>{html.escape(str(error))}</p>"
    # The prologue names a document type on another server; inline SVG needs neither.
    return re.sub(r"<metadata>.*?</metadata>", "", drawn[drawn.index("<svg") :], flags=re.S)


def _section(row: Row, baseline: str) -> str:
    notes = [f"channels last: {row.propagation}"] if row.propagation else []
    if row.published:
        notes.append(f"published {row.published}: {row.judgement} ({row.published.where})")
    if row.failure:
        notes.append(f"not measured: {row.failure}")
    fastest_first = sorted(row.measured, key=lambda m: m.median_s)
    cells = [_cells(row, m, baseline) for m in fastest_first]
    lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in line) for line in cells)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    head = "".join(f"<th>{name}</th>" for name in (*_HEAD, *_HEAD_MORE))
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if cells else ""
    return (
        f"<details{' open' if len(row.measured) else ''}><summary>{html.escape(str(row.case))}"
        f"<small>{html.escape('; '.join(notes))}</small></summary>{table}</details>"
    )


def _cells(row: Row, m: Measurement, baseline: str) -> list[str]:
    found = row.comparison(m.variant, baseline)
    low, high = m.samples.quartiles_s
    compared = found is not None and m.variant != baseline
    return [
        words.label(m.variant) + (f" {m.version}" if m.version else ""),
        words.bare_ms(m.median_s),
        f"{words.bare_ms(low)}-{words.bare_ms(high)}",
        f"{row.case.batch / m.median_s:.1f}",
        words.times(found.ratio) if found else "",
        words.interval(found) if found and compared else "",
        found.verdict if found and compared else "",
        f"{m.setup_s:.1f}",
        "" if m.peak_bytes is None else f"{m.peak_bytes / 1e6:.0f}",
        f"{m.error:.0e}",
    ]


def _problems(result: Benchmark) -> str:
    found = words.failures(result)
    if not found:
        return ""
    lines = "".join(f"<li>{html.escape(what)}: {html.escape(why)}</li>" for what, why in found)
    return f"<h2>Not measured</h2><ul>{lines}</ul>"
