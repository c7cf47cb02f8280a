"""Compare the community's list of 2022, for the CPU, with a table measured by `nhwc ops`.

    nhwc ops -o table.json
    python benchmarks/operators_wiki.py table.json > docs/operators-wiki-2022.md

The names are those of the page "Operators with Channels Last support" in PyTorch's wiki.
"""

from __future__ import annotations

import sys

from nhwc._ops import Operator, OperatorTable, Outcome, load_table

BOTH = """
abs acos add addcdiv addcmul asin atan2 ceil digamma div erfinv expm1 floor log log10 log1p log2
mul neg pow relu round rsqrt sigmoid sign sin sinh sqrt trunc
"""
"""Listed with their in-place forms."""

PLAIN = """
adaptive_avg_pool2d adaptive_max_pool2d avg_pool2d batch_norm bfloat16 bool byte char
channel_shuffle clone contiguous conv2d copy_ double empty_like fill_ float full_like group_norm gt
half int isnan long lt max_pool2d max_unpool2d ne ones_like pixel_shuffle pixel_unshuffle
randint_like rand_like randn_like resize_ resize_as_ short to type upsample_bilinear2d
upsample_nearest2d zero_ zeros_like
"""

TODAY = {
    "upsample_bilinear2d": "nn.functional.interpolate (bilinear)",
    "upsample_nearest2d": "nn.functional.interpolate (nearest)",
    "div": "div (no_rounding_mode)",
    "copy_": "Tensor.copy_",
    "zero_": "Tensor.zero_",
    "type": "Tensor.type",
    "fill_": "fill",
    "round": "round",
}
"""Operators that have another name in the table."""

GOOD = (Outcome.KEEPS, Outcome.VIEW)


def main() -> None:
    table = load_table(sys.argv[1])
    by_title = {op.title: op for op in table.operators}
    for op in table.operators:
        by_title.setdefault(op.name.removeprefix("nn.functional."), op)
    claims = [(name, True) for name in BOTH.split()] + [(name, False) for name in PLAIN.split()]
    found = [(name, both, by_title.get(TODAY.get(name, name))) for name, both in sorted(claims)]
    print("\n".join(report(table, found)))


def report(table: OperatorTable, found: list[tuple[str, bool, Operator | None]]) -> list[str]:
    pairs = sum(both for _, both, _ in found)
    return [
        "# The list of 2022, measured today",
        "",
        'PyTorch\'s wiki has a page "Operators with Channels Last support", kept by hand and last',
        f"edited in 2022. Its CPU list names {len(found)} operators, {pairs} of them with the",
        "in-place form. It knows no dtype, no backward pass, no 5-D tensors and no",
        f"torch version. Below is what torch {table.environment['torch']} does on a CPU, in",
        f"{table.dtypes[0]}, by [the measured table](operators.md).",
        "",
        *_doubtful(found),
        "",
        *_missing(table, found),
        "",
        "Made with `python benchmarks/operators_wiki.py docs/operators-torch-2.13-cpu.json`.",
    ]


def _doubtful(found: list[tuple[str, bool, Operator | None]]) -> list[str]:
    rows, agreed = [], 0
    for name, both, op in found:
        if op is None:
            rows.append(f"| `{name}` | not measured | |")
            continue
        forward, backward = op.outcome("forward", 4), op.outcome("backward", 4)
        inplace = op.outcome("in-place", 4) if both else Outcome.KEEPS
        fine = {Outcome.UNCHECKED, Outcome.NONE, *GOOD}
        if forward in GOOD and {backward, inplace} <= fine and not op.slower:
            agreed += 1
            continue
        words = [f"forward {forward}"]
        words += [f"backward {backward}"] if backward not in fine else []
        words += [f"in place {inplace}"] if inplace not in fine else []
        words += ["slower in NHWC"] if op.slower else []
        why = op.reason or next((r.example for r in op.rows if r.example and r.dims == 4), "")
        rows.append(f"| `{name}` | {'; '.join(words)} | {why} |")
    return [
        f"**{agreed} of {len(found)} hold in full**: forward and backward keep the format, and",
        "NHWC is not clearly slower. The others:",
        "",
        "| operator | today | why, in one call |",
        "|---|---|---|",
        *rows,
    ]


def _missing(table: OperatorTable, found: list[tuple[str, bool, Operator | None]]) -> list[str]:
    listed = {op.title for _, _, op in found if op}
    more = [
        op
        for op in table.operators
        if op.outcome("forward", 4) is Outcome.KEEPS
        and op.title not in listed
        and op.group != "nn module"
    ]
    nets = [f"`{op.title}`" for op in more if op.group == "nn function"]
    return [
        f"**Not in the list, yet they keep the format today: {len(more)} operators**, among them "
        f"{len(nets)} functions of neural networks: {', '.join(nets)}.",
    ]


if __name__ == "__main__":
    main()
