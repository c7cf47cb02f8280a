"""A benchmark as text for a terminal: a table with bars for one case, a row per case for many."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from .._bench import Benchmark, Changes, Row
from .._bench.engines import find_engine
from ..shown import printable
from . import bench_words as words
from .text import plural, width, wrap

_BAR, _LEAST_BAR = 24, 6


def bench_text(result: Benchmark) -> str:
    """The whole result, ready to print."""
    lines: list[str] = []
    if len(result.rows) == 1 and not result.rows[0].failure:
        row = result.rows[0]
        lines += [wrap(printable(str(row.case), keep=""), ""), "", *_one(row, result.baseline), ""]
        lines += [wrap(line, "") for line in _lines(row, result)]
    elif result.rows:
        cases = [row.case for row in result.rows]
        heading = result.title or plural(len(result.rows), "case")
        lines += [wrap(f"{heading}; {words.common(cases)}", ""), "", *_many(result), ""]
        lines += [wrap(idle, "")] if (idle := words.folded_nothing(result)) else []
    problems = words.failures(result)
    if problems:
        lines += ["not measured:"]
        lines += [wrap(f"{what}: {why}", "  ", "    ") for what, why in problems]
    if result.interrupted:
        lines.append("interrupted: this is what was measured until then")
    lines += [wrap(warning, "")] if (warning := words.noise(result)) else []
    return "\n".join([*lines, wrap(words.environment(result), "")]) + "\n"


def changes_text(changes: Changes) -> str:
    """Render the changes between two runs, those that got slower first."""
    cases = [change.case for change in changes.changes]
    table = [("", "before ms", "after ms", "speed", "interval", "")]
    for change in sorted(changes.changes, key=lambda c: c.comparison.ratio):
        found = change.comparison
        table.append(
            (
                f"{words.short(change.case, cases)}, {change.variant}",
                words.bare_ms(found.before.median_s),
                words.bare_ms(found.after.median_s),
                words.times(found.ratio),
                words.interval(found),
                change.verdict,
            )
        )
    end = [words.slower(changes)]
    if changes.failed:
        end.append("measured before, and not now:")
        end += [wrap(one, "  ", "    ") for one in words.failed(changes)]
    where = wrap(words.where_measured(changes), "")
    return "\n".join([*_fitting(table, (0, 5)), "", *end, where]) + "\n"


def columns(rows: Sequence[Sequence[str]], left: tuple[int, ...] = (0, -1)) -> list[str]:
    """Align cells: text to the left in the columns `left`, numbers to the right.

    >>> columns([("a", "1", "x"), ("bb", "22", "y")])
    ['a    1  x', 'bb  22  y']
    """
    count = len(rows[0])
    wide = [max(len(row[i]) for row in rows) for i in range(count)]
    lefts = {i % count for i in left}
    return [
        "  ".join(
            cell.ljust(wide[i]) if i in lefts else cell.rjust(wide[i]) for i, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]


def _fitting(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Align cells as `columns` does, in as many tables one below the other as the width requires.

    Each begins with the first column. A column without a heading stays beside the one before.
    """
    wide = [2 + max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    room = width() + 2 - wide[0]
    tables: list[list[int]] = []
    for i in range(1, len(wide)):
        following = itertools.takewhile(lambda j: not rows[0][j], range(i + 1, len(wide)))
        needed = sum(wide[j] for j in (*(tables[-1] if tables else ()), i, *following))
        if not tables or (rows[0][i] and needed > room):
            tables.append([])
        tables[-1].append(i)
    lines: list[str] = []
    for table in tables:
        cut = [[row[i] for i in (0, *table)] for row in rows]
        own = tuple(place for place, i in enumerate((0, *table)) if i in left)
        lines += ["", *columns([row for row in cut if any(row[1:])], own)]
    return lines[1:]


def _one(row: Row, baseline: str) -> list[str]:
    training = row.case.train
    head = ("", "ms", "steps/s" if training else "images/s", "speed", "99 % sure", "", "set-up s")
    table = [(*head, "peak MB", "error")]
    fastest = max((m.median_s for m in row.measured), default=0.0)
    ordered = sorted(row.measured, key=lambda m: m.median_s)
    top = fastest / ordered[0].median_s if ordered else 1.0
    for m in ordered:
        found = row.shown(m.variant, baseline)
        base = found is None or m.variant == baseline
        table.append(
            (
                words.label(m.variant),
                words.bare_ms(m.median_s),
                f"{(1 if training else row.case.batch) / m.median_s:.1f}",
                "" if found is None else words.times(found.ratio),
                "" if found is None or base else words.interval(found),
                "" if found is None or base else found.verdict,
                f"{m.setup_s:.1f}",
                "" if m.peak_bytes is None else f"{m.peak_bytes / 1e6:.0f}",
                f"{m.error:.0e}",
            )
        )
    lines = columns(table, left=(0, 5))
    wide = max(map(len, lines))
    longest = min(_BAR, width() - wide - 2)
    if longest < _LEAST_BAR:
        return _fitting(table, (0, 5))
    bars = [max(1, round(longest * fastest / m.median_s / top)) for m in ordered]
    drawn = zip(lines, [0, *bars], strict=True)
    return [f"{line:{wide}}  {'█' * bar}".rstrip() for line, bar in drawn]


def _lines(row: Row, result: Benchmark) -> list[str]:
    lines = [words.answer(row, result.baseline), *words.step_lines(row)]
    if row.propagation:
        lines.append(f"channels last: {row.propagation}")
    lines.append(words.floor(row))
    if row.published:
        judged = row.judgement.removesuffix(" here")
        lines.append(f"published: {row.published} ({row.published.where}): {judged} here")
    return [line for line in lines if line]


def _many(result: Benchmark) -> list[str]:
    cases = [row.case for row in result.rows]
    shown = words.compared(result)
    claims = {str(row.published) for row in result.rows if row.published}
    audited = any(row.propagation for row in result.rows)
    head = ["", f"{result.baseline} ms", *shown]
    head += [f"published {claims.pop()}"] if len(claims) == 1 else ["published"] * bool(claims)
    # A step from the baseline itself stands in the table already.
    steps = [v for v in words.steps(result) if find_engine(v).beyond != result.baseline]
    peers = not all(row.isolates for row in result.rows)
    head += [words.step(variant) for variant in steps]
    floors = any(row.floor for row in result.rows)
    head += ["floor ms", "of the peak"] * floors
    head += ["propagation"] * audited + ["best peer", "ours/peer", ""] * peers
    table = [head]
    for row in result.rows:
        base = row.measurement(result.baseline)
        line = [words.short(row.case, cases), words.bare_ms(base.median_s) if base else "-"]
        for variant in shown:
            found = row.shown(variant, result.baseline)
            line.append(_marked(found.ratio, found.verdict) if found else "-")
        line += [row.judgement] if any(name.startswith("published") for name in head) else []
        gains = [row.gain(variant) for variant in steps]
        line += [_marked(gain.ratio, gain.verdict) if gain else "-" for gain in gains]
        if floors:
            line += [words.bare_ms(row.floor.seconds) if row.floor else "-"]
            line += [words.share_of_peak(row) or "-"]
        table.append([*line, *[row.propagation] * audited, *_against(row) * peers])
    means = [f"{words.times(result.geometric_mean(variant))} " for variant in shown]
    alone = [
        f"{words.times(result.geometric_mean(variant, find_engine(variant).beyond))} "
        for variant in steps
    ]
    claimed = [""] * any(name.startswith("published") for name in head)
    table.append(["geometric mean", "", *means, *claimed, *alone])
    table[-1] += [""] * (len(head) - len(table[-1]))
    left = [i for i, name in enumerate(head) if name.startswith(("publ", "prop", "best"))]
    return _fitting(table, (0, *left, *[len(head) - 1] * peers))


def _marked(ratio: float, verdict: str) -> str:
    """A ratio with a question mark where noise may have made it."""
    return words.times(ratio) + ("?" if verdict == "too noisy to tell" else " ")


def _against(row: Row) -> list[str]:
    own, peer = row.best(ours=True), row.best(ours=False)
    if own is None or peer is None:
        return [peer.variant if peer else "", "-", ""]
    found = row.comparison(own.variant, peer.variant)
    assert found is not None
    return [peer.variant, words.times(found.ratio), found.verdict]
