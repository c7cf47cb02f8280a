"""The process that loads: each kind of case, under an audit hook."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from ..limits import limit_memory
from .changes import HARM, mutate
from .saved import Saved

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120
_MEMORY = 8 << 30


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
        elif event in ("subprocess.Popen", "os.posix_spawn"):
            if not any("assembler.py" in str(word) for word in args[1]):
                self.seen.append(f"start of {args[1]}")
        elif event in ("os.system", "os.exec", "pickle.find_class", "socket.connect"):
            self.seen.append(f"{event} of {args}"[:200])


def _writes(args: tuple[Any, ...]) -> bool:
    mode, flags = args[1], args[2] or 0
    return any(c in (mode or "") for c in "wax+") or bool(flags & (os.O_WRONLY | os.O_RDWR))


def work(folder: Path, seed: int, first: int) -> None:
    """Run case after case, and print a line of JSON for each, until somebody ends the process."""
    import torch

    import nhwc

    importlib.import_module("matplotlib.font_manager")  # At first it starts a program for fonts.
    files = [Saved.of(path) for path in sorted(folder.glob("*.nhwc"))]
    x = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = {one.name: nhwc.load(folder / f"{one.name}.nhwc")(x) for one in files}
    limit_memory(_MEMORY)
    sys.dont_write_bytecode = True  # Else the first case that needs a module writes beside it.
    faulthandler.enable()
    watch = Watch(folder)
    for number in range(first, 1 << 60):
        draw = random.Random(f"{seed} {number}")
        kind, case = (
            draw.choices((file_case, document_case, memory_case, kernel_case), (70, 20, 9, 1))[0],
            "",
        )
        print(json.dumps({"case": number, "begins": kind.__name__}), flush=True)
        watch.seen.clear()
        # The worker's stderr then shows where a case hangs.
        faulthandler.dump_traceback_later(PATIENCE_S - 5)
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


def document_case(folder: Path, _files: Any, _: Any, _x: Any, draw: random.Random) -> str:
    """Change a result, a table of operators or a baseline: it is refused, or can be shown."""
    import nhwc

    kinds = _documents()
    number = draw.randrange(len(kinds))
    whole, show = kinds[number]
    data = json.loads(whole)
    for _number in range(draw.choice((1, 1, 1, 2, 4))):
        mutate(data, json.loads(draw.choice(kinds)[0]), draw)
    path = folder / f"case-{number}.json"
    path.write_bytes(json.dumps(data).encode("utf-8", "surrogatepass"))
    try:
        show(path)
    except nhwc.FileError as error:
        return "refused" if str(error).isprintable() else f"no line of text: {error!r}"
    return "loaded"


@cache
def _documents() -> tuple[tuple[str, Callable[[Path], None]], ...]:
    """The text of each kind of document, and what reads it and shows all that it says."""
    from nhwc._audit.baseline import Baseline, Known

    known = Baseline((Known("net", "lost", "torch.cat", "net.py", "cat"),))
    few = json.loads((ROOT / "benchmarks/results/volumes-avx2.json").read_text())
    table = json.loads((ROOT / "docs/operators-torch-2.13-cpu.json").read_text())
    table["operators"] = table["operators"][::100]
    return (
        (json.dumps({**few, "rows": few["rows"][:2]}), _show_result),
        (json.dumps(table), _show_table),
        (known.to_json(), _show_baseline),
    )


def _show_result(path: Path) -> None:
    from nhwc._bench import compare, load_benchmark
    from nhwc.render.bench_csv import bench_csv
    from nhwc.render.bench_html import bench_html
    from nhwc.render.bench_plot import bench_plot
    from nhwc.render.bench_text import bench_text, changes_text

    result = load_benchmark(path)
    for show in (bench_text, bench_csv, bench_html):
        show(result)
    if result.rows:
        bench_plot(result)
    changes_text(compare(result, result))
    json.dumps(result.to_dict(), allow_nan=False)


def _show_table(path: Path) -> None:
    from nhwc._ops import difference, load_table
    from nhwc.render.ops_html import ops_html
    from nhwc.render.ops_markdown import ops_markdown
    from nhwc.render.ops_text import difference_text, ops_text

    table = load_table(path)
    for show in (ops_text, ops_html, ops_markdown):
        show(table)
    difference_text(difference(table, table))
    table.to_json()


def _show_baseline(path: Path) -> None:
    from nhwc._audit.baseline import load_baseline

    baseline = load_baseline(path)
    print(*baseline.split("net", baseline.known), file=io.StringIO())
    baseline.updated("net", ()).to_json()


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
    _kept.append(compiler._loaded())
    compiler._loaded.cache_clear()
    return _is_right(folder, draw.choice(files).name, expected, x)


_kept: list[Any] = []


def _is_right(folder: Path, name: str, expected: dict[str, Any], x: Any) -> str:
    import torch

    import nhwc

    loaded = nhwc.load(folder / f"{name}.nhwc")
    torch.testing.assert_close(loaded(x), expected[name], rtol=1e-3, atol=1e-4)
    return "loaded"
