"""`python -m nhwc` and the installed `nhwc`: ready for Ctrl-C before anything large is imported."""

import faulthandler
import os
import signal
import sys


def main() -> int:
    _open_closed_streams()
    # Where code of the user's, or an operator, kills the process, its line is said.
    faulthandler.enable()
    try:
        from .cli import main

        return main()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    finally:
        # What the interpreter does as it exits would answer another Ctrl-C with a traceback.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _open_closed_streams() -> None:
    """Open what was closed by `>&-`: else the next file to be opened would take its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


if __name__ == "__main__":
    sys.exit(main())
