"""Saved files and files of the cache, changed by structure, with every checksum right again.

    python -m benchmarks.fuzz --seconds 60
    python -m benchmarks.fuzz --seconds 3600 -o docs/fuzz.md

A process with bounded memory loads one case after the other under an audit hook, which sees every
import, every file that is opened and every program that is started. Each case is refused by a
FileError of one line, or loaded; anything else is a failure, and so is whatever a planted text sets
off, a process that dies, and a case that takes longer than two minutes. `--case N` runs one again.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import hashlib
import json
import os
import queue
import random
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .limits import limit_memory

HARM = "nhwc_fuzz_harm"
"""The module that planted code imports. It does not exist; an attempt shows that the code ran."""

_PATIENCE_S = 120
_MEMORY = 8 << 30

_PLACES = 100_000
"""A tree that has grown to so many places is changed no more."""

_CODE = f"__import__('{HARM}')"

TEXTS = (
    *(
        _CODE,
        f"x={_CODE}, y",
        f"{_CODE} #",
        f"start_dim=1 + 0*{_CODE}, end_dim",
        f'"), {_CODE}, ("',
    ),
    *(
        f"a\n    {_CODE}\n",
        f"x.{_CODE}",
        f"{{{_CODE}}}",
        f"[{_CODE} for x in [1]]",
        f"lambda: {_CODE}",
    ),
    *("os.system", "builtins.eval", "torch.load", "torch.hub.load", "__class__", "__reduce__"),
    *(
        "torch.set_default_dtype",
        "forward",
        "training",
        "self",
        "torch",
        "getattr",
        "class",
        "None",
    ),
    *(
        "\x1b[2J",
        "\x00",
        "\ud7ff\u202e",
        "a" * 20_000,
        "",
        ".",
        "..",
        "*x",
        "../../etc/passwd",
        "-1",
    ),
    *("1x3x8x8 float32", "99999999x99999999 float32", "9" * 5000, "(" * 900, "cuda", "meta", "nan"),
)
NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    255,
    1 << 20,
    1 << 31,
    1 << 40,
    (1 << 63) - 1,
    -(1 << 63),
    1 << 63,
    1 << 200,
)
VALUES: tuple[Any, ...] = (None, True, False, 0.5, -1.5, 1e308, [], {}, [[]], [None], {"": None})
TAGS = ("node", "tuple", "dict", "slice", "ellipsis", "float", "device", "dtype", "memory_format")


# How a tree of plain values is changed.


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in `tree` that can be written to: the list or mapping, and the index or key."""
    waiting = [tree]
    while waiting:
        here = waiting.pop()
        for key in list(here) if isinstance(here, dict) else range(len(here)):
            yield here, key
            if isinstance(here[key], (dict, list)):
                waiting.append(here[key])


def mutate(tree: Any, donor: Any, draw: random.Random) -> None:
    """Change one place of `tree`; `donor` is another such tree, whose parts may be taken."""
    found = list(places(tree))
    if not 0 < len(found) < _PLACES:
        return
    holder, key = draw.choice(found)
    value = holder[key]
    match draw.randrange(10):
        case 0:
            holder[key] = draw.choice(TEXTS)
        case 1:
            holder[key] = draw.choice(NUMBERS)
        case 2:
            holder[key] = json.loads(json.dumps(draw.choice(VALUES)))
        case 3:
            del holder[key]
        case 4 if isinstance(holder, list):
            holder.insert(draw.randrange(len(holder) + 1), json.loads(json.dumps(value)))
        case 5 if isinstance(holder, dict):
            holder[draw.choice((*TEXTS, *TAGS))] = holder.pop(key)
        case 6:
            parts = list(places(donor))
            other, place = draw.choice(parts) if parts else (tree, key)
            holder[key] = json.loads(json.dumps(other[place]))
        case 7:
            for _ in range(draw.choice((1, 3, 40, 150))):
                value = draw.choice(([value], {"tuple": [value]}, {draw.choice(TAGS): value}))
            holder[key] = value
        case 8 if isinstance(holder, list):
            draw.shuffle(holder)
        case 9 if isinstance(value, str) and value:
            place = draw.randrange(len(value))
            holder[key] = value[:place] + draw.choice(TEXTS) + value[place:]
        case _ if isinstance(value, (int, float)):
            holder[key] = draw.choice((value + 1, -value, value * 1000, float(value), str(value)))
        case _:
            holder[key] = [value] * draw.choice((2, 50))


# Saved files.


@dataclass(frozen=True)
class Saved:
    """A valid file, taken apart: its header, and its tensors' bytes."""

    name: str
    header: dict[str, Any]
    blobs: tuple[bytes, ...]

    @classmethod
    def of(cls, path: Path) -> Saved:
        data = path.read_bytes()
        (length,) = struct.unpack_from("<Q", data, 12)
        header = json.loads(data[60 : 60 + length])
        blobs, at = [], 60 + length
        for entry in header["tensors"]:
            size = _bytes_of(entry)
            at += -at % 64
            blobs.append(data[at : at + size])
            at += size
        return cls(path.stem, header, tuple(blobs))

    def with_indices(self, draw: random.Random) -> Saved:
        """The same file, whose tables of indices name other places."""
        blobs = list(self.blobs)
        entries = zip(self.header["tensors"], blobs, strict=True)
        whole = [i for i, (one, blob) in enumerate(entries) if one["dtype"] == "int64" and blob]
        if not whole:
            return self
        place = draw.choice(whole)
        numbers = list(struct.unpack(f"<{len(blobs[place]) // 8}q", blobs[place]))
        known = [number for number in NUMBERS if -(1 << 63) <= number < 1 << 63]
        numbers[draw.randrange(len(numbers))] = draw.choice(known)
        blobs[place] = struct.pack(f"<{len(numbers)}q", *numbers)
        header = json.loads(json.dumps(self.header))
        header["tensors"][place]["crc32"] = zlib.crc32(blobs[place])
        return Saved(self.name, header, tuple(blobs))

    def packed(self, header: Any) -> bytes:
        """The bytes of a file with another header, and all its checksums."""
        text = json.dumps(header).encode("utf-8", "surrogatepass")
        end = 60 + len(text)
        body = []
        for blob in self.blobs:
            gap = b"\0" * (-end % 64)
            body += [gap, blob]
            end += len(gap) + len(blob)
        fixed = struct.pack("<8sIQQ", b"\x89NHWC\r\n\x1a", 1, len(text), end)
        return fixed + hashlib.sha256(fixed + text).digest() + text + b"".join(body)


def _bytes_of(entry: dict[str, Any]) -> int:
    size = {"float32": 4, "int64": 8, "float16": 2, "float64": 8}[entry["dtype"]]
    for dim in entry["shape"]:
        size *= dim
    return size


def save_models(folder: Path) -> None:
    """Files of several kinds: all kinds of steps, arguments, layers and outputs."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    import nhwc

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
            self.scale = nn.Parameter(torch.ones(4, 1, 1))

        def forward(self, x: Any, gain: float = 2.0) -> Any:
            y = F.relu(self.norm(self.conv(x)) * self.scale) + gain
            y = F.interpolate(y, scale_factor=2.0, mode="nearest")[:, :, 1:, ...]
            y = y.to(torch.float32, memory_format=torch.channels_last)
            flat = torch.flatten(y, start_dim=1)
            return {"flat": flat, "rest": [y.sum(dim=(2, 3)), (y.shape[0], y.dim())]}

    class Sized(nn.Module):
        def forward(self, x: Any) -> Any:
            n, c, h, w = x.shape
            x = x.view(n, c, h * w).transpose(1, 2).softmax(dim=-1)
            return torch.cat([x, torch.zeros(n, 1, c)], dim=1).reshape(n, -1)

    class Windows(nn.Module):
        """Attention in shifted windows, with a bias that a table of indices picks."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Conv2d(3, 16, 1), nn.LayerNorm(16)
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
            self.bias = nn.Parameter(torch.randn(49, 2))
            self.register_buffer("index", torch.randint(0, 49, (16, 16)))

        def forward(self, x: Any) -> Any:
            y = self.embed(x).permute(0, 2, 3, 1)
            z = torch.roll(self.norm(y), (-2, -2), (1, 2)).view(1, 2, 4, 2, 4, 16)
            z = z.permute(0, 1, 3, 2, 4, 5).reshape(4, 16, 16)
            q, k, v = self.qkv(z).view(4, 16, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
            bias = self.bias[self.index.view(-1)].view(16, 16, 2).permute(2, 0, 1)
            z = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.unsqueeze(0))
            z = self.out(z.transpose(1, 2).reshape(4, 16, 16)).view(1, 2, 2, 4, 4, 16)
            z = torch.roll(z.permute(0, 1, 3, 2, 4, 5).reshape(1, 8, 8, 16), (2, 2), (1, 2))
            return (y + z).permute(0, 3, 1, 2)

    class Volume(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv3d(1, 8, 3, padding=1), nn.ConvTranspose3d(8, 4, 2, 2)
            self.norm = nn.InstanceNorm3d(8, affine=True)

        def forward(self, x: Any) -> Any:
            y = F.max_pool3d(F.relu(self.norm(self.one(x.unsqueeze(1)))), (1, 2, 2))
            y = torch.cat([self.two(y), F.pad(self.two(y).flip(3), (0, 0, 1, -1))], dim=1)
            return F.interpolate(y, scale_factor=2.0), F.adaptive_avg_pool3d(y, (1, 2, 2))

    class Detector(nn.Module):
        """Places that the best scores name are read from an image, and sampled between pixels."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.score = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 1, 1)
            self.grid = nn.Linear(8, 2)

        def forward(self, x: Any) -> Any:
            y = F.silu(self.body(x))
            score, place = self.score(y).flatten(1).topk(5)
            found = y.flatten(2).gather(2, place.unsqueeze(1).expand(-1, 8, -1)).transpose(1, 2)
            grid = self.grid(found).tanh().unsqueeze(2)
            part = F.grid_sample(y, grid, align_corners=False)
            shuffled = F.pixel_shuffle(F.channel_shuffle(y, 2), 2)
            return score, part, shuffled, F.fold(F.unfold(y, 3), (8, 8), 3)

    class Signal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.act = nn.Conv1d(3, 8, 5, stride=2, padding=2), nn.PReLU(8)
            self.norm, self.mix = nn.GroupNorm(2, 8), nn.Linear(16, 4)

        def forward(self, x: Any) -> Any:
            y = self.norm(self.act(self.conv(x.flatten(2))))
            both = torch.stack([F.max_pool1d(y, 2), F.avg_pool1d(y, 2)], 2)
            maps = torch.einsum("ncil,ncjl->nij", both, both).softmax(-1)
            return self.mix(both.reshape(1, 16, -1).transpose(1, 2)), maps, F.normalize(y)

    tower = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    models = {
        "mixed": Mixed(),
        "sized": Sized(),
        "tower": nn.Sequential(tower, nn.Flatten(), nn.Linear(8, 4)),
        "windows": Windows(),
        "volume": Volume(),
        "detector": Detector(),
        "signal": Signal(),
        "recurrent": nn.Sequential(nn.Flatten(2), nn.LSTM(64, 4, batch_first=True)),
    }
    torch.manual_seed(0)
    with torch.no_grad():
        for name, model in models.items():
            nhwc.save(nhwc.optimize(model.eval(), torch.randn(1, 3, 8, 8)), folder / f"{name}.nhwc")
            saved = Saved.of(folder / f"{name}.nhwc")
            header = saved.header | {"planned": [["1x3x8x8 float32"]]}
            (folder / f"{name}.nhwc").write_bytes(saved.packed(header))


# The process that loads.


class Watch:
    """An audit hook that records events that no load should cause."""

    def __init__(self, folder: Path) -> None:
        self.seen: list[str] = []
        self._own = (str(folder), os.path.realpath(tempfile.gettempdir()), "/dev/null", "/proc/")
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "import" and HARM in str(args[0]):
            self.seen.append(f"import of {args[0]}")
        elif event == "open" and not isinstance(args[0], int) and _writes(args):
            if not os.path.realpath(os.fsdecode(args[0])).startswith(self._own):
                self.seen.append(f"open of {args[0]!r} to write")
        elif event == "subprocess.Popen":
            if not any("assembler.py" in str(word) for word in args[1]):
                self.seen.append(f"start of {args[1]}")
        elif event in (
            "os.system",
            "os.exec",
            "os.posix_spawn",
            "pickle.find_class",
            "socket.connect",
        ):
            self.seen.append(f"{event} of {args}"[:200])


def _writes(args: tuple[Any, ...]) -> bool:
    mode, flags = args[1], args[2] or 0
    return any(c in (mode or "") for c in "wax+") or bool(flags & (os.O_WRONLY | os.O_RDWR))


def work(folder: Path, seed: int, first: int) -> None:
    """Run case after case, and print a line of JSON for each, until somebody ends the process."""
    import torch

    import nhwc

    files = [Saved.of(path) for path in sorted(folder.glob("*.nhwc"))]
    x = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = {one.name: nhwc.load(folder / f"{one.name}.nhwc")(x) for one in files}
    limit_memory(_MEMORY)
    faulthandler.enable()
    watch = Watch(folder)
    for number in range(first, 1 << 60):
        draw = random.Random(f"{seed} {number}")
        kind, case = draw.choices((file_case, memory_case, kernel_case), (90, 9, 1))[0], ""
        print(json.dumps({"case": number, "begins": kind.__name__}), flush=True)
        watch.seen.clear()
        # The worker's stderr then shows where a case hangs.
        faulthandler.dump_traceback_later(_PATIENCE_S - 5)
        try:
            with torch.no_grad():
                case = kind(folder, files, expected, x, draw)
        except Exception as error:
            case = f"{type(error).__name__}: {error}"[:500]
        said = {"case": number, "kind": kind.__name__, "outcome": case, "seen": watch.seen}
        print(json.dumps(said), flush=True)


def file_case(folder: Path, files: list[Saved], _: Any, x: Any, draw: random.Random) -> str:
    """Load a saved file with a few places of its header changed: it is refused or loads."""
    import nhwc

    saved = draw.choice(files)
    if draw.random() < 0.1:
        saved = saved.with_indices(draw)
    header = json.loads(json.dumps(saved.header))
    for _number in range(draw.choice((1, 1, 1, 2, 4))):
        mutate(header, draw.choice(files).header, draw)
    path = folder / "case"
    path.write_bytes(saved.packed(header))
    try:
        loaded = nhwc.load(path)
    except nhwc.FileError as error:
        return "refused" if str(error).isprintable() else f"no line of text: {error!r}"
    # Only planned models are called: an unplanned one may take as long as its author likes.
    return _answers_as_its_graph(loaded, x) if loaded.recipes else "loaded"


def _answers_as_its_graph(loaded: Any, x: Any) -> str:
    import torch
    from torch.utils import _pytree as pytree

    def numbers(answer: Any) -> list[Any]:
        return [leaf for leaf in pytree.tree_leaves(answer) if isinstance(leaf, torch.Tensor)]

    try:
        wanted = loaded.portable(x)
    except Exception:
        # What torch refuses, the plan may refuse in other words, and must not answer.
        with contextlib.suppress(Exception):
            return f"answered {str(loaded(x))[:100]} where its graph raises"
        return "loaded"
    found = numbers(loaded(x))
    torch.testing.assert_close(found, numbers(wanted), rtol=1e-2, atol=1e-3, equal_nan=True)
    return "loaded"


def memory_case(
    folder: Path, files: list[Saved], expected: dict[str, Any], x: Any, draw: random.Random
) -> str:
    """Change the stored measurements: a model that is loaded by them must still be right."""
    [path] = (folder / "cache" / "plans").glob("*.json")
    before = path.read_bytes()
    data = json.loads(before)
    for _ in range(draw.choice((1, 4, 15))):
        mutate(data, json.loads(before), draw)
    path.write_bytes(json.dumps(data).encode("utf-8", "surrogatepass"))
    try:
        return _is_right(folder, draw.choice(files).name, expected, x)
    finally:
        path.write_bytes(before)


def kernel_case(
    folder: Path, files: list[Saved], expected: dict[str, Any], x: Any, draw: random.Random
) -> str:
    """Replace one kernel's file by another's, or damage it: it must be compiled again."""
    from nhwc.kernels.language import compiler

    paths = sorted((folder / "cache" / "kernels").glob("*.o"))
    one, two = draw.sample(paths, 2)
    content = one.read_bytes() or b"emptied before"
    place = draw.randrange(len(content))
    damaged = content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    one.write_bytes(draw.choice((two.read_bytes(), damaged, content[:place], b"")))
    # The code of programs that are still there stays where it is.
    _kept.append(dict(compiler._loaded()))
    compiler._loaded.cache_clear()
    return _is_right(folder, draw.choice(files).name, expected, x)


_kept: list[dict[Any, Any]] = []


def _is_right(folder: Path, name: str, expected: dict[str, Any], x: Any) -> str:
    import torch

    import nhwc

    loaded = nhwc.load(folder / f"{name}.nhwc")
    torch.testing.assert_close(loaded(x), expected[name], rtol=1e-3, atol=1e-4)
    return "loaded"


# The process that watches it.


@dataclass
class Figures:
    """Counts of the outcomes, and the failures in words."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, said: dict[str, Any]) -> None:
        outcome = said["outcome"] if not said["seen"] else f"did {said['seen']}"
        known = outcome in ("refused", "loaded")
        self.counts[said["kind"], outcome if known else "failed"] += 1
        if not known:
            self.failures.append(f"case {said['case']} ({said['kind']}): {outcome}")

    @property
    def cases(self) -> int:
        return sum(self.counts.values())


def run(
    seed: int,
    *,
    seconds: float = 1e9,
    cases: int = 1 << 60,
    first: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Figures:
    """Run `cases` cases, for `seconds` at most, and count their outcomes."""
    figures = Figures()
    with tempfile.TemporaryDirectory(prefix="nhwc-fuzz-") as name:
        folder = Path(name)
        environment = os.environ | {"NHWC_CACHE": str(folder / "cache")}
        command = [sys.executable, "-m", "benchmarks.fuzz"]
        subprocess.run([*command, "--make", name], env=environment, check=True)
        began = time.monotonic()
        start = [*command, "--worker", name, "--seed", str(seed), "--case"]
        number = first
        while number < first + cases and time.monotonic() - began < seconds:
            number = _watch(
                [*start, str(number)], environment, figures, first + cases, began + seconds
            )
            say(f"{figures.cases} cases, {len(figures.failures)} failures")
    figures.seconds = time.monotonic() - began
    return figures


def _watch(
    command: list[str], environment: dict[str, str], figures: Figures, last: int, until: float
) -> int:
    """Start a worker and count its cases until it fails or time is up; the number of the next."""
    worker = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    lines: queue.Queue[str | None] = queue.Queue()
    assert worker.stdout is not None
    reader = threading.Thread(target=_read, args=(worker.stdout, lines), daemon=True)
    reader.start()
    number, kind = int(command[-1]), "start"
    try:
        while number < last and (kind == "start" or time.monotonic() < until):
            try:
                line = lines.get(timeout=_PATIENCE_S * (3 if kind == "start" else 1))
            except queue.Empty:
                line = ""
            if not line:
                died = f"takes more than {_PATIENCE_S} s"
                if line is None:
                    died = f"died with status {worker.wait()}"
                figures.add({"case": number, "kind": kind, "outcome": died, "seen": []})
                return number + 1
            said = json.loads(line)
            number, kind = said["case"], said.get("begins", kind)
            if "outcome" in said:
                figures.add(said)
                number += 1
        return number
    finally:
        worker.kill()
        worker.wait()
        reader.join()
        worker.stdout.close()


def _read(stream: Any, lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def page(figures: Figures, seed: int) -> str:
    """The figures as a page of documentation."""
    rows = []
    for kind, what in (
        ("file_case", "saved files"),
        ("memory_case", "memory of measurements"),
        ("kernel_case", "compiled kernels"),
    ):
        counts = [figures.counts[kind, outcome] for outcome in ("refused", "loaded", "failed")]
        rows.append(f"| {what} | {sum(counts)} | {' | '.join(map(str, counts))} |")
    failures = "\n".join(f"- {one}" for one in figures.failures) or "None."
    return f"""# Files changed by structure

Written by `python -m benchmarks.fuzz --seconds {figures.seconds:.0f} --seed {seed} -o FILE`: valid
files, of which a few places were changed (types, names, numbers; parts deleted, doubled, moved,
taken from other files; planted code in every text and key), every checksum right again. A saved
file is *refused* in one line, or *loaded*, having run nothing; what the cache holds is *loaded*
with the right answers, since it is believed only if it fits. Planted code that ran, a traceback, a
process that died, 8 GB of memory or two minutes would be *failed*. The suite runs a few hundred
of these cases.

| files | cases | refused | loaded | failed |
|---|---|---|---|---|
{chr(10).join(rows)}

Failures: {failures}
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
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
