"""Runs the fuzzer from the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import __doc__ as about
from .cases import work
from .figures import page, run
from .saved import save_models


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=about)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this one alone")
    parser.add_argument("-o", "--output", type=Path, help="write the figures here")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.make or args.worker:
        if args.make:
            save_models(args.make)
        else:
            work(args.worker, args.seed, args.case)
        return 0
    one = {} if args.case is None else {"first": args.case, "cases": 1}
    figures = run(args.seed, seconds=args.seconds, say=print, **one)
    print("\n".join(figures.failures))
    print({" ".join(key): count for key, count in sorted(figures.counts.items())})
    if args.output:
        args.output.write_text(page(figures, args.seed))
    return 1 if figures.failures else 0


if __name__ == "__main__":
    sys.exit(main())
