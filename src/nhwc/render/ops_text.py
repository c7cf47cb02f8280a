"""The operator table, one operator, and two tables compared, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from .._ops import Difference, Operator, OperatorTable, Outcome
from .text import paint, plural, wrap

COLORS = {
    Outcome.WRONG: "red",
    Outcome.ERROR: "red",
    Outcome.LOSES: "red",
    Outcome.SOMETIMES: "yellow",
    Outcome.CONVERTS: "yellow",
    Outcome.KEEPS: "green",
}


def ops_text(table: OperatorTable, *, color: bool = False) -> str:
    """Few operators in full; many as lists of names, the worst first."""
    if len(table.operators) <= 8:
        parts = [operator_text(op, color=color) for op in table.operators]
        left = [f"{title}  not checked: {reason}\n" for title, reason in table.left_out.items()]
        return "\n".join([*parts, *left])
    return _overview(table, color)


def _overview(table: OperatorTable, color: bool) -> str:
    dtype = table.dtypes[0]
    lines = [
        paint(
            f"{len(table.operators)} operators of torch {table.environment['torch']}", "bold", color
        )
        + f" on {table.device}, {dtype}; {table.seconds:.0f} s",
    ]
    for dims, aspect in ((4, "forward"), (4, "backward"), (5, "forward")):
        heading = f"{aspect.capitalize()}, {dims}-D"
        lines += ["", paint(heading, "bold", color)]
        for outcome in table.count(aspect, dims):
            names = [op.title for op in table.operators if _is(op, aspect, dims, outcome)]
            lines.append(paint(f"  {outcome}: {len(names)}", COLORS.get(outcome, "dim"), color))
            if outcome not in (Outcome.KEEPS, Outcome.NONE, Outcome.VIEW):
                lines.append(wrap(", ".join(names), "    "))
    slower = [(speed.ratio, op, speed) for op in table.operators for speed in op.speeds]
    slower = sorted((s for s in slower if s[2].slower), key=lambda s: s[0])
    if slower:
        lines += ["", paint("Clearly slower in NHWC than in NCHW", "bold", color)]
        words = [f"{op.title} {1 / ratio:.1f}x ({speed.case})" for ratio, op, speed in slower]
        lines.append(wrap(", ".join(words), "    "))
    problems = [f"{op.title}: {op.problem}" for op in table.operators if op.problem]
    if problems:
        lines += ["", paint("Not checked in full", "bold", color)]
        lines += [wrap(problem, "    ") for problem in problems]
    lines += ["", *(wrap(note, "") for note in table.notes)]
    lines.append(
        wrap(
            f"{plural(len(table.left_out), 'operator')} left out (--format json says why each). "
            "One in full: nhwc ops NAME",
            "",
        )
    )
    return "\n".join(lines) + "\n"


def _is(op: Operator, aspect: str, dims: int, outcome: Outcome) -> bool:
    return op.row(aspect, dims) is not None and op.outcome(aspect, dims) is outcome


def operator_text(op: Operator, *, color: bool = False) -> str:
    """One operator in full: each aspect, the dtypes it holds for, and the reason."""
    outcome = op.outcome()
    head = paint(str(outcome), COLORS.get(outcome, "dim"), color)
    lines = [f"{paint(op.title, 'bold', color)}  {head}"]
    merged: dict[tuple, list[str]] = {}
    for row in op.rows:
        key = (row.aspect, row.dims, row.outcome, row.cases, row.of, row.example)
        merged.setdefault(key, []).append(row.dtype)
    for (aspect, dims, outcome, cases, of, example), dtypes in merged.items():
        word = f"{outcome!s:<16}"
        line = f"  {dims}-D {aspect:<9} {word} {cases}/{of} calls  {' '.join(dtypes)}"
        painted = paint(word, COLORS.get(outcome, "dim"), color)
        lines.append(wrap(line, "", 6 * " ").replace(word, painted, 1))
        if example:
            lines.append(wrap(example, "      "))
    for speed in op.speeds:
        flag = "slower in NHWC"
        line = wrap(
            f"{speed.case}, {speed.shape}, {speed.dtype}: NCHW {_time(speed.nchw_s)}, "
            f"NHWC {_time(speed.nhwc_s)}, {speed.ratio:.2f}x{f'  {flag}' * speed.slower}",
            "  ",
            6 * " ",
        )
        lines.append(line.replace(flag, paint(flag, "red", color)))
    if op.problem:
        lines.append(wrap(f"not checked in full: {op.problem}", "  "))
    return "\n".join(lines) + "\n"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def difference_text(found: Sequence[Difference], *, color: bool = False) -> str:
    """Render one line for each difference."""
    if not found:
        return "nothing changed\n"
    lines = []
    for change in found:
        what = " ".join(filter(None, (change.aspect, f"{change.dims}-D" if change.dims else "")))
        where = f" {what} {change.dtype}:" if what else ":"
        line = wrap(f"{change.title}{where} {change.before} -> {change.after}", "", "    ")
        lines.append(line.replace(change.title, paint(change.title, "bold", color), 1))
    return "\n".join([*lines, "", plural(len(found), "change"), ""])
