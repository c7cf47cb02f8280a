"""Write docs/claims.md: `python -m benchmarks.claims`.

Rules, audits and small programs run here and now; they assert what happens, never how fast. Speeds
come from benchmarks/results: record those first (`python -m benchmarks.published` for blog, fusion
and apex; `python -m benchmarks.gpu -o benchmarks/results/gpu` on a machine with a GPU), then run
this again, and their rows fill in.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from nhwc.machine.environment import Environment

from .claims_checks import CHECKS
from .claims_evidence import OUTCOMES, Evidence, Found
from .claims_rows import CLAIMS, Claim

PAGE = Path(__file__).parents[1] / "docs" / "claims.md"

INTRODUCTION = """\
# Every claim of the sources

Written by `python -m benchmarks.claims`. Each row is a claim of one of the sources, in our words,
the command that shows it, and its outcome here: *shown*; *exceeded*, where more holds than was
claimed; *not here*, with what was seen instead; *needs a GPU*; *not recorded yet*. Rules, audits
and programs ran on {environment};
speeds and the table of operators are those recorded in
[performance.md](performance.md) and [operators.md](operators.md), with their machines.

{counts}"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [check.__name__ for check in CHECKS]
    parser.add_argument("--show", choices=names, help="run one program, and print what it saw")
    parser.add_argument("-o", "--output", type=Path, default=PAGE, help="docs/claims.md")
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    if args.show:
        print(next(check() for check in CHECKS if check.__name__ == args.show))
        return
    evidence = Evidence()
    args.output.write_text(page([(claim, claim.look(evidence)) for claim in CLAIMS]))
    print(f"wrote {args.output}")


def page(found: Sequence[tuple[Claim, Found]]) -> str:
    counts = ", ".join(
        f"{count} {outcome}"
        for outcome in OUTCOMES
        if (count := sum(seen.outcome == outcome for _, seen in found))
    )
    here = str(Environment.here())
    parts = [INTRODUCTION.format(environment=here, counts=f"{len(found)} claims: {counts}.")]
    numbered = list(enumerate(found, start=1))
    for source, members in groupby(numbered, key=lambda item: item[1][0].source):
        lines = [
            f"## {source}",
            "",
            "| | claim | command | outcome | seen |",
            "|---|---|---|---|---|",
        ]
        for number, (claim, seen) in members:
            lines.append(
                f"| {number} | {claim.says} | `{claim.command}` | {seen.outcome} "
                f"| {seen.words.replace('|', '/')} |"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
