"""Build the wheel and the sdist, and check what a release promises: docs/releasing.md has the list.

    python -m benchmarks.release            # needs build and twine: `make release-check` has them

Both are left in dist/ if nothing is wrong.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from configparser import ConfigParser
from pathlib import Path

import nhwc

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "nhwc"

ENTRY_POINTS = {
    "console_scripts": "nhwc",
    "pytest11": "nhwc",
    "torch_dynamo_backends": "nhwc",
}


class Wrong(Exception):
    """A promise that does not hold, in a line."""


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(argv)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="nhwc-release-") as name:
        folder = Path(name)
        for what, check in CHECKS.items():
            try:
                check(folder)
            except (Wrong, subprocess.CalledProcessError, StopIteration) as error:
                failed += 1
                print(f"wrong: {what}: {' '.join(_said(error).split())[:500]}", flush=True)
            else:
                print(f"right: {what}", flush=True)
        if not failed:
            shutil.copytree(folder / "dist", ROOT / "dist", dirs_exist_ok=True)
    return 1 if failed else 0


def _said(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return f"{Path(error.cmd[0]).name} {' '.join(error.cmd[1:4])}: {error.output}"
    return str(error) or type(error).__name__


def _run(*command: str, cwd: Path = ROOT) -> str:
    """What a command prints; CalledProcessError if it fails."""
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )
    return done.stdout


def versions() -> dict[str, str]:
    """The version, wherever it is written down."""
    written = {
        "pyproject.toml": r'^version = "(.+)"$',
        "CITATION.cff": r"^version: (.+)$",
        "CHANGELOG.md": r"^## (\S+)",
    }
    found = {"nhwc.__version__": nhwc.__version__}
    for name, pattern in written.items():
        match = re.search(pattern, (ROOT / name).read_text(), re.MULTILINE)
        found[name] = match[1] if match else ""
    return found


def _one_version(_: Path) -> None:
    if len(set(versions().values())) > 1:
        raise Wrong(f"{versions()}")


def _nothing_uncommitted(_: Path) -> None:
    if changed := _run("git", "status", "--porcelain").strip():
        raise Wrong(changed)


def _built(folder: Path) -> None:
    _run(sys.executable, "-m", "build", "--outdir", str(folder / "dist"), str(ROOT))


def _metadata(folder: Path) -> None:
    files = sorted(str(path) for path in (folder / "dist").iterdir())
    _run(sys.executable, "-m", "twine", "check", "--strict", *files)


def _wheel(folder: Path) -> Path:
    return next((folder / "dist").glob("*.whl"))


def _holds(folder: Path) -> None:
    names = set(zipfile.ZipFile(_wheel(folder)).namelist())
    listed = _run("git", "ls-files", "src/nhwc").split()
    wanted = {name.removeprefix("src/") for name in listed}
    own = {name for name in names if ".dist-info/" not in name}
    if own != wanted:
        raise Wrong(f"missing {sorted(wanted - own)}, not asked for {sorted(own - wanted)}")
    if "nhwc/py.typed" not in names or not any(name.endswith("/LICENSE") for name in names):
        raise Wrong("no py.typed, or no licence")


def _entry_points(folder: Path) -> None:
    wheel = zipfile.ZipFile(_wheel(folder))
    name = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    parser = ConfigParser()
    parser.read_string(wheel.read(name).decode())
    found = {group: ", ".join(parser[group]) for group in parser.sections()}
    if found != ENTRY_POINTS:
        raise Wrong(f"{found}")


_WORKS = """
import pathlib, sys, torch, nhwc
assert pathlib.Path(nhwc.__file__).is_relative_to(sys.prefix), nhwc.__file__
net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
x = torch.randn(1, 3, 8, 8)
with torch.no_grad():
    torch.testing.assert_close(nhwc.optimize(net, x)(x), net(x))
    nhwc.load(sys.argv[1])(x)
"""


def _works(folder: Path) -> None:
    python = str(folder / "venv" / "bin" / "python")
    # This environment's packages are seen from there, so torch is not installed again.
    _run(sys.executable, "-m", "venv", str(folder / "venv"))
    sites = next((folder / "venv" / "lib").glob("python*/site-packages"))
    here = sysconfig.get_paths()["purelib"]
    _run(python, "-m", "pip", "install", "--quiet", "--no-deps", str(_wheel(folder)))
    (sites / "others.pth").write_text(here + "\n")
    _run(python, "-I", "-m", "nhwc", "--version", cwd=folder)
    saved = ROOT / "tests" / "files" / "data" / "version-1.nhwc"
    _run(python, "-I", "-c", _WORKS, str(saved), cwd=folder)


_TYPED = """
import nhwc, torch
fast = nhwc.optimize(torch.nn.ReLU(), torch.ones(1, 3, 4, 4))
reveal_type(fast)
nhwc.optimize(torch.nn.ReLU(), exact="yes")
"""


def _types_seen(folder: Path) -> None:
    (folder / "user.py").write_text(_TYPED)
    python = str(folder / "venv" / "bin" / "python")
    command = [sys.executable, "-m", "mypy", "--python-executable", python, "user.py"]
    said = subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout
    if "nhwc.optimized.Optimized" not in said or '"exact"' not in said:
        raise Wrong(said)


CHECKS: dict[str, Callable[[Path], None]] = {
    "one version everywhere": _one_version,
    "nothing uncommitted": _nothing_uncommitted,
    "wheel and sdist are built": _built,
    "metadata": _metadata,
    "what the wheel holds": _holds,
    "entry points": _entry_points,
    "it works installed": _works,
    "its types are seen": _types_seen,
}


if __name__ == "__main__":
    sys.exit(main())
