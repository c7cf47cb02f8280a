"""Faults of the machine: kills, want of memory, crowds, another processor, a long run.

    python -m benchmarks.faults --seconds 300
    python -m benchmarks.faults --seconds 3600 --only soak

Each scenario starts processes that do what users do, does them harm, and then looks: a file is
whole or not there, the cache is right or not used, the user's model is as it was, what was refused
was refused for what it lacked. A line for each scenario says how many trials there were; what went
wrong comes below it, and the exit status is 1. Disks that are full or missing are in
tests/machine/test_disk.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nhwc
from nhwc.errors import is_out_of_memory
from nhwc.kernels.language.isa import ALL, host_features
from nhwc.machine.disk import replace_file

_PROCESSES, _THREADS = 10, 16

_GROWTH = 64 << 20
"""Bytes by which a long run may grow after its first quarter: malloc's gaps, not a leak."""

_PATIENCE_S = 600

Trial = Iterator[str]
"""What came of each trial: empty if it went as it should."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="for all scenarios together")
    parser.add_argument("--only", choices=SCENARIOS, action="append", help="repeat for several")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        name, folder, *rest = args.child
        CHILDREN[name](Path(folder), *rest)
        return 0
    chosen = args.only or list(SCENARIOS)
    failed = 0
    for name in chosen:
        with tempfile.TemporaryDirectory(prefix="nhwc-faults-") as folder:
            end = time.monotonic() + args.seconds / len(chosen)
            outcomes = list(SCENARIOS[name](Path(folder), end, random.Random(args.seed)))
        wrong = [one for one in outcomes if one]
        failed += len(wrong)
        print(f"{name}: {len(outcomes)} trials, {len(wrong)} wrong", flush=True)
        for one in wrong[:10]:
            print(f"  {one}", flush=True)
    return 1 if failed else 0


# What users do.


def network(width: int = 16) -> tuple[nn.Module, Tensor]:
    """The same small network and image each time."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU()),
        *(nn.Conv2d(width, width, 3, padding=1), nn.Hardswish()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4)),
    )
    return net.eval(), torch.randn(1, 3, 32, 32)


def digest(net: nn.Module) -> str:
    """The same for the same weights, modes and hooks."""
    found = hashlib.sha256()
    for name, value in net.state_dict().items():
        found.update(f"{name} {value.stride()}".encode() + value.contiguous().numpy().tobytes())
    modes = [(name, m.training, len(m._forward_hooks)) for name, m in net.named_modules()]
    return hashlib.sha256(found.digest() + repr(modes).encode()).hexdigest()


def is_right(model: nn.Module) -> bool:
    """Whether a model answers as the network does."""
    net, x = network()
    with torch.no_grad():
        return bool(torch.allclose(model(x), net(x), rtol=1e-3, atol=1e-4))


def start(folder: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    """Start this file as a child that shares the cache of `folder`."""
    env = os.environ | {"NHWC_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "2"} | environment
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.faults", "--child", *words],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ended(child: subprocess.Popen[str]) -> tuple[int, str, str]:
    """How a child ended: its status, and the last lines of what it said."""
    out, err = child.communicate(timeout=_PATIENCE_S)
    return child.returncode, (out.splitlines() or [""])[-1], (err.splitlines() or [""])[-1][:200]


# Kills.


def kills(folder: Path, end: float, draw: random.Random) -> Trial:
    """Kill a process that optimizes, saves and reports at a random moment."""
    while time.monotonic() < end:
        child = start(folder, "writes", str(folder))
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(draw.uniform(0.0, 3.0))
        child.kill()
        child.communicate()
        yield _whole(folder)


def _writes(folder: Path) -> None:
    net, x = network()
    print("ready", flush=True)
    with torch.no_grad():
        while True:
            fast = nhwc.optimize(net, x, remeasure=True)
            for number in range(20):
                nhwc.save(fast, folder / "model.nhwc")
                replace_file(folder / "report", [bytes([number]) * (1 << 20)])


def _whole(folder: Path) -> str:
    report, model = folder / "report", folder / "model.nhwc"
    if report.exists() and report.read_bytes() != report.read_bytes()[:1] * (1 << 20):
        return "half a report"
    os.environ["NHWC_CACHE"] = str(folder / "cache")
    try:
        if model.exists() and not is_right(nhwc.load(model)):
            return "a model that answers wrongly"
        for path in (folder / "cache").rglob("*.json"):
            json.loads(path.read_bytes())
    except (nhwc.NhwcError, ValueError) as error:
        return f"half a file: {error}"
    return ""


# Want of memory.


def memory(folder: Path, end: float, draw: random.Random) -> Trial:
    """Give optimize, save and a call less memory than they need."""
    status, said, err = ended(start(folder, "starved", str(folder), str(4 << 30)))
    if said != "done":
        yield f"with memory enough: {status} {said} {err}"
    while time.monotonic() < end:
        more = draw.randrange(1 << 20, 400 << 20)
        status, said, err = ended(start(folder, "starved", str(folder), str(more)))
        right = status == 0 and said in ("done", "refused")
        yield "" if right else f"{more >> 20} MB more: status {status}, {said} {err}"


def _starved(folder: Path, more: str) -> None:
    """Do all of it within `more` bytes; whatever happens, the user's model must be as it was."""
    net, x = network(256)
    x = torch.randn(4, 3, 128, 128)
    path = folder / f"starved-{os.getpid()}.nhwc"
    with torch.no_grad():
        expected, before = net(x), digest(net)
        _limit(_virtual() + int(more))
        said = "done"
        try:
            fast = nhwc.optimize(net, x)
            nhwc.save(fast, path)
            nhwc.load(path)(x)
        except Exception as error:
            said = "refused" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
        _limit(resource.RLIM_INFINITY)
        if digest(net) != before or not torch.allclose(net(x), expected, atol=1e-4):
            said = "the model is not as it was"
        elif path.exists() and not torch.allclose(nhwc.load(path)(x), expected, atol=1e-3):
            said = "half a file"
    path.unlink(missing_ok=True)
    left = [one.name for one in folder.glob(".nhwc-*")]
    print(f"left behind: {left}" if left else " ".join(said.split())[:200])


def _virtual() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _limit(size: int) -> None:
    """Let this process have so much address space; the limit can be raised again."""
    resource.setrlimit(resource.RLIMIT_AS, (size, resource.getrlimit(resource.RLIMIT_AS)[1]))


# A crowd.


def crowd(folder: Path, end: float, draw: random.Random) -> Trial:
    """Many processes of many threads begin at once with one empty cache."""
    number = 0
    while number == 0 or time.monotonic() < end:
        own = folder / str(number)
        own.mkdir()
        for child in [start(own, "threads", str(own)) for _ in range(_PROCESSES)]:
            status, said, err = ended(child)
            yield "" if said == "right" else f"status {status}, {said} {err}"
        number += 1


def _threads(folder: Path) -> None:
    torch.set_num_threads(1)
    net, x = network()
    wrong: list[str] = []
    with torch.no_grad():
        fast = nhwc.optimize(net, x)

    def work() -> None:
        try:
            for _ in range(50):
                if not is_right_of(fast, net, x):
                    wrong.append("a wrong answer")
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work) for _ in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(wrong[0] if wrong else "right")


def is_right_of(fast: nn.Module, net: nn.Module, x: Tensor) -> bool:
    with torch.no_grad():
        return bool(torch.allclose(fast(x), net(x), rtol=1e-3, atol=1e-4))


# Another processor.


def processor(folder: Path, end: float, draw: random.Random) -> Trial:
    """Run with one instruction set on the cache and the file that another left."""
    features = host_features()
    names = [one.name for one in ALL if all(features.get(need) for need in one.needs)]
    number = 0
    while number < 2 * len(names) or time.monotonic() < end:
        name = names[number % len(names)]
        status, said, err = ended(start(folder, "moved", str(folder), NHWC_ISA=name))
        yield "" if said == "right" else f"{name}: status {status}, {said} {err}"
        number += 1


def _moved(folder: Path) -> None:
    net, x = network()
    path = folder / "moved.nhwc"
    with torch.no_grad():
        right = not path.exists() or is_right(nhwc.load(path))
        fast = nhwc.optimize(net, x)
        nhwc.save(fast, path)
        print("right" if right and is_right(fast) else "a wrong answer")


# A long run.


def soak(folder: Path, end: float, draw: random.Random) -> Trial:
    """Mix calls of all kinds in one process; its memory must not grow."""
    seconds = str(max(20.0, end - time.monotonic()))
    child = start(folder, "mixed", str(folder), seconds)
    out, err = child.communicate(timeout=float(seconds) + _PATIENCE_S)
    yield "" if child.returncode == 0 else f"status {child.returncode}: {out[-200:]} {err[-300:]}"
    print(f"  {out.strip()}")


def _mixed(folder: Path, seconds: str) -> None:
    net, x = network()
    began, early, calls = time.monotonic(), 0, 0
    with torch.no_grad():
        fast = nhwc.optimize(net, x)
        while (spent := time.monotonic() - began) < float(seconds):
            for act in _acts(folder, net, fast, x):
                act()
                calls += 1
            if spent > float(seconds) / 4 and not early:
                early = _taken()
    grown = _taken() - early
    print(f"{calls} calls, from {early >> 20} MB by {grown / (1 << 20):.1f} MB")
    sys.exit(1 if early and grown > _GROWTH else 0)


def _acts(
    folder: Path, net: nn.Module, fast: nn.Module, x: Tensor
) -> tuple[Callable[[], Any], ...]:
    path = folder / "mixed.nhwc"

    def change() -> None:
        """New weights, which are noticed and packed anew."""
        first = next(fast.parameters())
        first.mul_(1.0)
        fast(x)

    def refuse() -> None:
        try:
            fast(torch.zeros(1, 5, 7, 7))
        except Exception:
            return

    return (
        *[lambda: fast(x)] * 20,
        lambda: fast(torch.randn(2, 3, 24, 40)),
        change,
        refuse,
        lambda: nhwc.fuse(net)(x),
        lambda: nhwc.audit(net, x),
        lambda: nhwc.save(fast, path),
        lambda: nhwc.load(path)(x),
        lambda: nhwc.optimize(net, x)(x),
    )


def _taken() -> int:
    """Bytes of memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


SCENARIOS: dict[str, Callable[[Path, float, random.Random], Trial]] = {
    "kills": kills,
    "memory": memory,
    "crowd": crowd,
    "processor": processor,
    "soak": soak,
}

CHILDREN: dict[str, Callable[..., None]] = {
    "writes": _writes,
    "starved": _starved,
    "threads": _threads,
    "moved": _moved,
    "mixed": _mixed,
}


if __name__ == "__main__":
    sys.exit(main())
