"""Run the recipes and put what they print into docs/recipes.md: python -m benchmarks.recipes

A block of the page that follows a comment <!-- printed by: COMMAND --> is what COMMAND printed. A
recipe whose package is not installed leaves its block as it is.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "recipes.md"

_BLOCK = re.compile(r"(<!-- printed by: (.+?) -->\n\n```text\n)(.*?)(```\n)", re.DOTALL)

_FITTING = """
import runpy, sys
from nhwc.models.vision import mend_torchvision
mend_torchvision()
sys.argv = sys.argv[1:]
sys.path.insert(0, "recipes")
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script, also beside a torchvision that was built for another torch."""


def main(argv: Sequence[str] | None = None) -> int:
    only = list(sys.argv[1:] if argv is None else argv)
    commands = [found[2] for found in _BLOCK.finditer(PAGE.read_text())]
    for command in commands:
        _, script, *words = shlex.split(command)
        if only and Path(script).stem not in only:
            continue
        print(command, file=sys.stderr, flush=True)
        printed = _printed(script, words)
        if printed is not None:
            # One after the other: what was printed is kept if a later recipe is broken off.
            PAGE.write_text(_BLOCK.sub(_renewer(command, printed), PAGE.read_text()))
    return 0


def _printed(script: str, words: Sequence[str]) -> str | None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FITTING, script, *words],
        cwd=ROOT, env=os.environ | {"YOLO_OFFLINE": "true"}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    if done.returncode:
        print(f"  ended with {done.returncode}: its block stays as it was", file=sys.stderr)
        return None
    return done.stdout


def _renewer(command: str, printed: str) -> Callable[[re.Match[str]], str]:
    """Return what puts `printed` into the block of `command`, and leaves the others."""
    return lambda found: found[1] + printed + found[4] if found[2] == command else found[0]


if __name__ == "__main__":
    sys.exit(main())
