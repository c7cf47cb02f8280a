"""Run a suite, or write the page of all of them. Run as `python -m benchmarks.conformance`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from operator import itemgetter
from pathlib import Path

from nhwc.kernels.language.isa import host
from nhwc.machine.environment import Environment
from nhwc.machine.workers import Ended, Nursery

from .judging import FAILED, REFUSED, RIGHT, WRONG, Outcome
from .ledger import Ledger, Row
from .page import SUITES, page, recorded, renew
from .verbs import USUAL, VERBS

PACKAGES = ("torchvision", "timm", "onnx", "onnx2torch")

PATIENCE_S = 300.0
"""How long a case may take."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for; 1 if any case is wrong or failed."""
    args = _parser().parse_args(argv)
    if args.output:
        ledgers = recorded()
        args.output.write_text(page(ledgers))
        renew(ledgers)
        return 0
    ledger = Ledger.read(args.suite, host().name)
    suite = importlib.import_module(_module(args.suite))
    every = suite.groups()
    ledger.groups, ledger.where = len(every), _where()
    chosen = [group for group in every if not args.case or args.case in group]
    verbs = args.verb or list(getattr(suite, "VERBS", USUAL))
    for group in chosen if args.case or args.again else ():
        ledger.rows.pop(group, None)
    todo = {group: ledger.lacking(group, verbs) for group in chosen}
    groups = _broad([group for group in todo if todo[group]], ledger, args.seed)
    run(ledger, {group: todo[group] for group in groups}, seconds=args.seconds)
    print(f"{len(ledger.rows)} of {len(every)} groups have a row")
    for (verb, verdict), number in sorted(ledger.counts.items()):
        print(f"{verb:16} {verdict:8} {number:7}")
    return 1 if any(verdict in (WRONG, FAILED) for _, verdict in ledger.counts) else 0


def _broad(groups: Sequence[str], ledger: Ledger, seed: int) -> list[str]:
    """`groups` by lot, those first whose operator or module has the fewest rows."""
    rows = Counter(group.split()[0] for group in ledger.rows)
    drawn: list[tuple[int, str]] = []
    for group in random.Random(seed).sample(groups, len(groups)):
        name = group.split()[0]
        drawn.append((rows[name], group))
        rows[name] += 1
    return [group for _, group in sorted(drawn, key=itemgetter(0))]


def run(ledger: Ledger, todo: Mapping[str, Sequence[str]], *, seconds: float) -> None:
    """Ask each group about its verbs, a process a core, until all are done or time is up."""
    end = time.monotonic() + seconds
    suite = ledger.suite
    with (
        Nursery("benchmarks.conformance.worker", _module(suite), threads=1) as nursery,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
    ):

        def work(group: str) -> tuple[str, Row | None]:
            late = time.monotonic() > end
            return group, None if late else run_group(nursery, suite, group, todo[group])

        for done in as_completed([pool.submit(work, group) for group in todo]):
            group, row = done.result()
            if row is not None:
                ledger.rows.setdefault(group, Row()).update(row)
                _say(group, row)
                ledger.write()


def run_group(nursery: Nursery, suite: str, group: str, verbs: Sequence[str]) -> Row:
    """Run one group in a process of its own: whatever ends it is the outcome of its case.

    What that case was not asked yet, and the cases behind it, are asked in another process.
    """
    row, begun, asked = Row(asked=set(verbs)), 0, list(verbs)
    while (ended := _run_on(nursery, suite, group, verbs, row, Place(begun, asked))) is not None:
        begun, asked = ended.begun, ended.asked[1:]
        if not ended.asked:
            # It died while it made the next case, and would do so again.
            break
        if not asked:
            begun, asked = begun + 1, list(verbs)
    return row


@dataclass
class Place:
    """Where a group is: the number of its case, and the verbs which that was not asked yet."""

    begun: int
    asked: list[str]


def _run_on(
    nursery: Nursery, suite: str, group: str, verbs: Sequence[str], row: Row, start: Place
) -> Place | None:
    """Run a group from `start` on; None if it came to its end, or else the place where it died."""
    case, place = group, Place(start.begun - 1, [])
    try:
        with nursery.worker() as worker:
            worker.send((_module(suite), group, list(verbs), start.begun, start.asked))
            while (said := worker.hear(PATIENCE_S)) is not None:
                if isinstance(said, Outcome):
                    row.add(said)
                    place.asked.remove(said.verb)
                else:
                    first = place.begun < start.begun
                    case = said
                    place = Place(place.begun + 1, list(start.asked if first else verbs))
    except Ended as error:
        row.add(Outcome(case, (place.asked or list(verbs))[0], FAILED, str(error)))
        return place
    return None


def _where() -> dict[str, str | int]:
    """The machine, and the versions of all that was asked."""
    where = Environment.here().to_dict()
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            where[package] = version(package)
    return where


def _module(suite: str) -> str:
    return f"{__package__}.{suite}"


def _say(group: str, row: Row) -> None:
    for one in row.told:
        if one.verdict not in (RIGHT, REFUSED):
            print(f"{one.verdict}: {one.case}: {one.verb}: {one.why}")
    print(f"{row.counts.total():5} {group}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.conformance", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("suite", nargs="?", choices=SUITES, default="opinfo")
    parser.add_argument("--seconds", type=float, default=600.0, help="start no group after this")
    parser.add_argument("--case", default="", help="run the groups with this in their name, again")
    parser.add_argument("--verb", action="append", choices=VERBS, help="ask this verb alone")
    parser.add_argument("--again", action="store_true", help="forget the rows that are there")
    parser.add_argument("--seed", type=int, default=0, help="another order")
    parser.add_argument("-o", "--output", type=Path, help="write the page of all suites here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
