"""The operator table in Markdown: to be committed, and read on a forge."""

from __future__ import annotations

from collections.abc import Iterator

from .._ops import Operator, OperatorTable, Outcome, Tally
from .._ops.table import ASPECTS, MEANING

MARKS = {
    Outcome.WRONG: "**wrong values**",
    Outcome.ERROR: "**error**",
    Outcome.LOSES: "**loses**",
    Outcome.SOMETIMES: "*sometimes*",
    Outcome.CONVERTS: "*converts*",
    Outcome.KEEPS: "keeps",
    Outcome.VIEW: "view",
    Outcome.NONE: "·",
    Outcome.UNCHECKED: "not checked",
}
COLUMNS = (("forward", 4), ("backward", 4), ("forward", 5), ("backward", 5)) + tuple(
    (aspect, 4) for aspect in ASPECTS[2:]
)


def ops_markdown(table: OperatorTable) -> str:
    """Render the whole table: what the words mean, each group, the reasons, what is left out."""
    parts = [
        *_head(table),
        *_broken(table),
        *_groups(table),
        *_reasons(table),
        *_left_out(table),
    ]
    return "\n".join(parts) + "\n"


def _head(table: OperatorTable) -> Iterator[str]:
    env = table.environment
    yield "# Operators and channels last, measured"
    yield ""
    cpu = f"{env['processor']}, {env['instruction_set']}"
    yield f"torch {env['torch']} on {env['device'] if table.device != 'cpu' else cpu};"
    yield f"dtypes {', '.join(table.dtypes)}. The tables show {table.dtypes[0]}; where another"
    yield "dtype differs in the forward or backward pass, the last column says so."
    yield ""
    yield "| word | meaning | operators, forward 4-D |"
    yield "|---|---|---:|"
    count = table.count()
    for outcome, meaning in MEANING.items():
        yield f"| {MARKS[outcome]} | {meaning} | {count.get(outcome, 0)} |"
    yield ""
    yield "NHWC: how many times as fast as NCHW, forward, one thread, a large input, timed in"
    yield "turns; of several calls the worst; in bold where it is clearly slower, the whole"
    yield "interval of 99 % below 0.9. Operators are measured side by side: a ratio near 1 and"
    yield "not bold says that no difference was seen."


def _groups(table: OperatorTable) -> Iterator[str]:
    for group in dict.fromkeys(op.group for op in sorted(table.operators, key=_group_order)):
        members = [op for op in table.operators if op.group == group]
        yield f"\n## {_ORDER.get(group, group)} ({len(members)})\n"
        yield "| operator | " + " | ".join(_heading(*c) for c in COLUMNS) + " | NHWC | dtypes |"
        yield "|---|" + "---|" * len(COLUMNS) + "---:|---|"
        for op in members:
            cells = [MARKS[row.outcome] if (row := op.row(*c)) else "" for c in COLUMNS]
            yield f"| `{op.title}` | {' | '.join(cells)} | {_speed(op)} | {_dtypes(op, table)} |"


_ORDER = {
    "nn function": "Functions of neural networks",
    "nn module": "Modules",
    "tensor": "Tensor operators",
    "reduction": "Reductions",
    "pointwise": "Pointwise operators",
    "linear algebra": "Linear algebra",
}


def _group_order(op: Operator) -> int:
    return list(_ORDER).index(op.group) if op.group in _ORDER else len(_ORDER)


def _broken(table: OperatorTable) -> Iterator[str]:
    yield "\n## Wrong values and errors\n"
    yield "In any aspect, dtype and number of dimensions; one call of each."
    yield ""
    for op in table.operators:
        seen: dict[tuple[str, Outcome], list[Tally]] = {}
        for row in op.rows:
            if row.outcome in (Outcome.WRONG, Outcome.ERROR):
                seen.setdefault((row.aspect, row.outcome), []).append(row)
        for (aspect, outcome), rows in seen.items():
            dtypes = ", ".join(dict.fromkeys(row.dtype for row in rows))
            example = _escape(rows[0].example)
            yield f"- `{op.title}`, {aspect}, {dtypes}: {MARKS[outcome]}. {example}"


def _heading(aspect: str, dims: int) -> str:
    return aspect if dims == 4 else f"{aspect} 5-D"


def _speed(op: Operator) -> str:
    if not op.speeds:
        return ""
    worst = min(op.speeds, key=lambda speed: speed.ratio)
    return f"**{worst.ratio:.2f}**" if op.slower else f"{worst.ratio:.2f}"


def _dtypes(op: Operator, table: OperatorTable) -> str:
    words = []
    for aspect, dims in COLUMNS[:4]:
        first = op.row(aspect, dims, table.dtypes[0])
        for dtype in table.dtypes[1:]:
            row = op.row(aspect, dims, dtype)
            if row and (first is None or row.outcome is not first.outcome):
                words.append(f"{dtype} {_heading(aspect, dims)}: {row.outcome}")
    return "; ".join(words)


def _reasons(table: OperatorTable) -> Iterator[str]:
    yield "\n## Why\n"
    yield "The first call found of each operator that does not keep the format, forward, 4-D or"
    yield "else 5-D.\n"
    for op in table.operators:
        if op.reason and op.outcome() not in (Outcome.KEEPS, Outcome.VIEW, Outcome.NONE):
            yield f"- `{op.title}` {op.outcome()}: {_escape(op.reason)}"


def _left_out(table: OperatorTable) -> Iterator[str]:
    yield f"\n## Left out ({len(table.left_out)})\n"
    reasons: dict[str, list[str]] = {}
    for title, reason in table.left_out.items():
        reasons.setdefault(reason, []).append(f"`{title}`")
    for reason, titles in reasons.items():
        yield f"- {_escape(reason)}: {', '.join(titles)}"
    for note in table.notes:
        yield f"- {_escape(note)}"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
