"""Every model of torchvision and timm through audit, fuse, optimize, save and load: all right?

    python -m benchmarks.zoo_sweep                       # all that have no row yet
    python -m benchmarks.zoo_sweep --sample 20 --seed 1
    python -m benchmarks.zoo_sweep --only 'swin|vit' --jobs 2
    python -m benchmarks.zoo_sweep --since 2026-11-30    # also those whose row is older

Weights are random and batch norms have random statistics: with the defaults folding is trivially
right. Each model gets the smallest input that it accepts, in a process of its own with a limit of
processor time and memory, unless its weights alone are past that; a transformer is made for small
images where timm can make it so. Rows are kept in benchmarks/results/zoo_sweep.json, with a table
in Markdown and a page to filter beside it; a second run goes on where the first one stopped. Speed
ratios are those of tiny inputs, and of a busy machine where several jobs run: `nhwc bench` is for
times.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import date
from pathlib import Path

import torch

from .zoo_names import names, sizes_known
from .zoo_row import Limits, say_row
from .zoo_tables import Row, html, markdown, summary

RESULTS = Path(__file__).parent / "results" / "zoo_sweep.json"

SERVER = multiprocessing.get_context("forkserver")
"""Forks processes from one that has imported torch, torchvision and timm."""

_WAITING = 10
"""The limit in real time, as a multiple of that in processor time: the machine may be busy."""
_COPIES = 4
"""The least memory of a row, as a multiple of the weights: 10 GB were too little for 2.5 GB."""
_BEYOND = ("can't allocate memory", "Cannot allocate memory", "MemoryError", "bad_alloc")
"""Phrases in the reason of a row whose process exceeded its limit of memory."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep; 1 if any row is wrong or failed."""
    args = parsed(argv)
    rows: dict[str, Row] = json.loads(args.output.read_text()) if args.output.exists() else {}
    chosen = args.models or [n for n in names() if re.search(args.only, n)]
    if args.sample:
        chosen = random.Random(args.seed).sample(chosen, min(args.sample, len(chosen)))
    todo = [name for name in chosen if name not in rows or rows[name]["day"] < args.since]
    end = time.monotonic() + args.stop_after
    SERVER.set_forkserver_preload(["benchmarks.zoo_row"])
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = {pool.submit(one_row, name, args, end): name for name in todo}
        for future in as_completed(waiting):
            name, row = waiting[future], future.result()
            if row is None:
                continue
            rows[name] = row | {"jobs": args.jobs, "day": date.today().isoformat()}
            print(f"{name}: {row['outcome']} {row.get('reason', '')}"[:160], flush=True)
            keep(rows, args.output)
    print(summary({name: rows[name] for name in chosen if name in rows}))
    return int(any(rows[n]["outcome"] in ("WRONG", "failed") for n in chosen if n in rows))


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", help="these alone; without any, all there are")
    parser.add_argument("--only", default="", help="names that this regular expression finds")
    parser.add_argument("--sample", type=int, default=0, help="only so many, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--since", default="", help="also those whose row is older than this day")
    parser.add_argument("--seconds", type=float, default=180, help="of processor time")
    parser.add_argument("--gigabytes", type=float, default=8, help="limit for one model")
    parser.add_argument("--stop-after", type=float, default=1e9, help="start no model after this")
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def one_row(name: str, args: argparse.Namespace, end: float) -> Row | None:
    """Make the row of one model in a process of its own; None if it is too late to start one."""
    if time.monotonic() > end:
        return None
    weights = sizes_known().get(name, 0) * 4e-9
    if _COPIES * weights > args.gigabytes:
        reason = f"not tried: {weights:.1f} GB of weights, and all steps take {_COPIES} times that"
        return {"outcome": "over the limit", "reason": reason}
    seconds = math.ceil(args.seconds)
    limits = Limits(
        int(args.gigabytes * 1e9), seconds, max(1, torch.get_num_threads() // args.jobs)
    )
    with tempfile.NamedTemporaryFile("r", errors="replace") as said:
        process = SERVER.Process(target=say_row, args=(name, said.name, limits))
        process.start()
        process.join(_WAITING * args.seconds)
        if process.is_alive():
            process.kill()
            process.join()
            return {"outcome": "over the limit", "reason": f"more than {_WAITING * seconds} s"}
        lines = said.read().strip().splitlines() or [""]
    if process.exitcode == -signal.SIGXCPU:
        return {"outcome": "over the limit", "reason": f"more than {seconds} s of processor time"}
    if process.exitcode or not lines[-1].startswith("{"):
        reason = f"ended with {process.exitcode}: {lines[-1][:200]}"
        return {"outcome": "failed", "reason": reason}
    row: Row = json.loads(lines[-1])
    if any(sign in row["reason"] for sign in _BEYOND):
        row["outcome"] = "over the limit"
    return row


def keep(rows: Mapping[str, Row], path: Path) -> None:
    """Write the rows, and beside them a table and a page for people."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(rows))
    path.with_suffix(".html").write_text(html(rows))


if __name__ == "__main__":
    sys.exit(main())
