"""Every model of torchvision and timm through audit, fuse, optimize, save and load: all right?

    python -m benchmarks.zoo_sweep                       # all that have no row yet
    python -m benchmarks.zoo_sweep --sample 20 --seed 1
    python -m benchmarks.zoo_sweep --only 'swin|vit' --jobs 2

Weights are random and batch norms have random statistics: with the defaults folding is trivially
right. Each model gets the smallest input that it accepts, in a process of its own with a limit of
processor time and memory. Rows are kept in benchmarks/results/zoo_sweep.json, with a table in
Markdown and a page to filter beside it; a second run goes on where the first one stopped. Speed
ratios are those of tiny inputs, and of a busy machine where several jobs run: `nhwc bench` is for
times.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from .zoo_names import names
from .zoo_tables import Row, html, markdown, summary

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "zoo_sweep.json"

_WAITING = 10
"""How many times its processor time a model may take on a machine that is busy otherwise."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the sweep; 1 if any row is wrong or failed."""
    args = parsed(argv)
    rows: dict[str, Row] = json.loads(args.output.read_text()) if args.output.exists() else {}
    chosen = args.models or [n for n in names() if re.search(args.only, n)]
    if args.sample:
        chosen = random.Random(args.seed).sample(chosen, min(args.sample, len(chosen)))
    todo = [name for name in chosen if args.again or name not in rows]
    end = time.monotonic() + args.stop_after
    with ThreadPoolExecutor(args.jobs) as pool:
        waiting = {pool.submit(one_row, name, args, end): name for name in todo}
        for future in as_completed(waiting):
            name, row = waiting[future], future.result()
            if row is None:
                continue
            rows[name] = row
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
    parser.add_argument("--again", action="store_true", help="also those that have a row")
    parser.add_argument("--seconds", type=float, default=180, help="of processor time")
    parser.add_argument("--gigabytes", type=float, default=8, help="limit for one model")
    parser.add_argument("--stop-after", type=float, default=1e9, help="start no model after this")
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args(argv)


def one_row(name: str, args: argparse.Namespace, end: float) -> Row | None:
    """The row of one model, from a process of its own; None if it is too late to start one."""
    if time.monotonic() > end:
        return None
    size, seconds = int(args.gigabytes * 1e9), math.ceil(args.seconds)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (size, size))
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))

    command = [sys.executable, "-m", "benchmarks.zoo_row", name]
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // args.jobs)))
    path = os.pathsep.join((str(ROOT / "src"), os.environ.get("PYTHONPATH", "")))
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=_WAITING * args.seconds,
            preexec_fn=limit,
        )
    except subprocess.TimeoutExpired:
        return {"outcome": "over the limit", "reason": f"more than {_WAITING * seconds} s"}
    if done.returncode == -signal.SIGXCPU:
        return {"outcome": "over the limit", "reason": f"more than {seconds} s of processor time"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines and lines[-1].startswith("{"):
        row: Row = json.loads(lines[-1])
        beyond = ("can't allocate memory", "MemoryError", "bad_alloc")
        if any(sign in row["reason"] for sign in beyond):
            row["outcome"] = "over the limit"
        return row | {"jobs": args.jobs}
    last = done.stderr.strip().splitlines()[-1:] or [""]
    return {"outcome": "failed", "reason": f"ended with {done.returncode}: {last[0][:200]}"}


def keep(rows: Mapping[str, Row], path: Path) -> None:
    """Write the rows, and beside them what people read."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")
    path.with_suffix(".md").write_text(markdown(rows))
    path.with_suffix(".html").write_text(html(rows))


if __name__ == "__main__":
    sys.exit(main())
