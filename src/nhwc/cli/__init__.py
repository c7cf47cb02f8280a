"""The command line: the only room that composes, prints and exits. One small file per verb.

A verb's file has `HELP`, `add_arguments(parser)` and `run(args) -> int`. It is imported when it is
asked for, so that `nhwc --help` does not pay for what it does not use.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import NoReturn

from .. import __version__
from ..errors import InputError, NhwcError, ProcessLost
from ..shown import printable

VERBS = {
    "audit": "where the model loses or converts its memory format, what it costs, how to mend it",
    "optimize": "the same answers, faster, never slower: fold, fuse, choose kernels by measurement",
    "bench": "prove it: ways to run a model, timed side by side",
    "ops": "which operators of this torch keep channels last on this device, measured",
    "train": "train in mixed precision, channels last, in one process or, under torchrun, in many",
    "demo": "all of it on a small built-in choice of model, with a page to look at",
}
"""Each verb with its line of help; `nhwc.cli.VERB` runs it."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    debug = "--debug" in argv
    try:
        args = _parse([word for word in argv if word != "--debug"])
        return int(args.run(args))
    except NhwcError as error:
        if debug:
            raise
        line = f"error: {printable(' '.join(str(error).split()), keep='')}"
        if not _is_said(error, line):
            print(line, file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of our output has gone (`nhwc audit ... | head`); keep the exit quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _is_said(error: NhwcError, line: str) -> bool:
    """Whether another of torchrun's processes says the same."""
    if "WORLD_SIZE" not in os.environ:
        return False
    from ..training.distributed import said_by_first

    # Nobody else says which process lost another.
    return said_by_first(line, wait=not isinstance(error, ProcessLost))


class _Parser(argparse.ArgumentParser):
    """Bad arguments are an error like any other: one line, exit 2."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}. See {self.prog} --help.")


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="nhwc",
        description="The memory format of PyTorch vision models: visible, fast and proven.",
        epilog="nhwc VERB --help says more. --debug shows the traceback of an error.",
    )
    parser.add_argument("--version", action="version", version=f"nhwc {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    chosen = next((word for word in argv if not word.startswith("-")), None)
    for name, line in VERBS.items():
        sub = verbs.add_parser(name, help=line, description=line[0].upper() + line[1:] + ".")
        if name == chosen:
            verb = importlib.import_module(f".{name}", __name__)
            verb.add_arguments(sub)
            sub.set_defaults(run=verb.run, parser=sub)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args
