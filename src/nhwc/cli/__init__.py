"""The command line: the only room that composes, prints and exits. One small file per verb.

A verb's file has `add_arguments(parser)` and `run(args) -> int`. It is imported when it is asked
for, so that `nhwc --help` does not pay for what it does not use.

Exit status: 0; 1 where the command was asked to judge and the answer is no; 2 for an error; 130
after Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Collection, Iterator
from typing import Any, NoReturn

from ..errors import InputError, ModelFailed, NhwcError, ProcessLost, is_out_of_memory, is_too_large
from ..shown import first_line, printable
from .interrupt import ends_at_once
from .progress import drop, put, say

VERBS = {
    "audit": "where the model loses or converts its memory format, what it costs, how to mend it",
    "optimize": "the same answers, faster, never slower: fold, fuse, choose kernels by measurement",
    "bench": "prove it: ways to run a model, timed side by side",
    "ops": "which operators of this torch keep channels last on this device, measured",
    "train": "train in mixed precision, channels last, in one process or, under torchrun, in many",
    "demo": "audit and optimize one small model, and write a page to look at",
}
"""Each verb with its line of help; `nhwc.cli.VERB` runs it."""

SHELLS = ("bash", "zsh", "fish")


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return _run([word for word in argv if word != "--debug"])
    except BrokenPipeError:
        # The reader of our output has gone (`nhwc audit ... | head`); keep the exit quiet too.
        drop(sys.stdout)
        return 0
    except KeyboardInterrupt:
        say("interrupted\n")
        return 130
    except Exception as error:
        if "--debug" in argv:
            traceback.print_exc()
        else:
            _say(error)
        return 2


def _run(argv: list[str]) -> int:
    try:
        with ends_at_once():
            args = _parse(argv)
        try:
            with _silence() if args.quiet else contextlib.nullcontext():
                return int(args.run(args))
        except SystemExit as error:
            raise ModelFailed(
                f"the model's code ended the program (sys.exit({error.code!r})) when it was run."
            ) from error
        except ModelFailed as error:
            if getattr(args, "input", "") is None:
                raise ModelFailed(
                    f"{error} The input was the default one, 1x3x224x224: give another with "
                    "--input, 1x3x16x112x112 for a clip, say."
                ) from error
            raise
    finally:
        # Flush before the interpreter exits, so that `main` can catch the error of a closed pipe.
        sys.stdout.flush()


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Lead stderr nowhere: notes, warnings, and what a model's code prints. `main` tells errors."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


def _say(error: Exception) -> None:
    line = f"error: {printable(' '.join(_words(error).split()), keep='')}"
    if not _is_said(error, line):
        say(line + "\n")


def _words(error: Exception) -> str:
    if isinstance(error, NhwcError):
        return str(error)
    first = first_line(error)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"{str(error.filename)[:60]}... is longer than a name of a file may be. Shorten it."
    if isinstance(error, PermissionError) and error.filename is not None:
        return f"{error.filename} may not be looked at here. Change its rights, or name another."
    if is_out_of_memory(error) or is_too_large(error):
        return f"out of memory: {first}. Use a smaller input, batch or model."
    return f"{type(error).__name__}: {first}. This was not foreseen; --debug shows where it arose."


def _is_said(error: Exception, line: str) -> bool:
    """Whether another of torchrun's processes says the same."""
    if "WORLD_SIZE" not in os.environ:
        return False
    from .._train.distributed import said_by_first

    # Each ProcessLost names its own process, so no other process says the same.
    return said_by_first(line, wait=not isinstance(error, ProcessLost))


class _Parser(argparse.ArgumentParser):
    """Bad arguments are an error like any other: one line, exit 2."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}. See {self.prog} --help.")


class _Version(argparse.Action):
    """Print what was found on the machine."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        from .version import version_text

        put(version_text())
        parser.exit()


def _parse(argv: list[str]) -> argparse.Namespace:
    chosen = _first_word(argv)
    if chosen is not None and chosen not in VERBS:
        raise InputError(f"there is no verb {chosen!r}{_nearest_verb(chosen)}")
    parser, _ = make_parser([chosen] if chosen else [])
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return args


def make_parser(wanted: Collection[str]) -> tuple[_Parser, dict[str, argparse.ArgumentParser]]:
    """Return the whole parser, and each verb's; only those `wanted` know their arguments."""
    parser = _Parser(
        prog="nhwc",
        description="The memory format of PyTorch vision models: visible, fast and proven.",
        epilog="nhwc VERB --help says more. --debug shows the traceback of an error.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="of nhwc, torch, the machine")
    parser.add_argument("--completion", choices=SHELLS, help="print a script for this shell")
    _add_quiet(parser, default=False)
    parser.set_defaults(run=lambda args: _no_verb(parser, args), parser=parser)
    choices = parser.add_subparsers(metavar="VERB")
    verbs: dict[str, argparse.ArgumentParser] = {}
    for name, line in VERBS.items():
        sub = choices.add_parser(name, help=line, description=line[0].upper() + line[1:] + ".")
        if name in wanted:
            verb = importlib.import_module(f".{name}", __name__)
            verb.add_arguments(sub)
            _add_quiet(sub, default=argparse.SUPPRESS)
            sub.set_defaults(run=verb.run, parser=sub)
        verbs[name] = sub
    return parser, verbs


def _add_quiet(parser: argparse.ArgumentParser, default: object) -> None:
    words = "nothing on stderr but errors"
    parser.add_argument("-q", "--quiet", action="store_true", default=default, help=words)


def _no_verb(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    if args.completion is None:
        parser.print_help()
        return 0
    from .completion import completion

    put(completion(args.completion, *make_parser(VERBS)))
    return 0


def _first_word(argv: list[str]) -> str | None:
    """Return the verb, or the word in its place; None if there is none."""
    words = iter(argv)
    for word in words:
        if word == "--completion":
            next(words, None)
        elif not word.startswith("-"):
            return word
    return None


def _nearest_verb(word: str) -> str:
    import difflib

    near = difflib.get_close_matches(word, VERBS, n=1)
    return f"; did you mean {near[0]}?" if near else f". There are: {', '.join(VERBS)}."
