"""`python -m nhwc` and the installed `nhwc`: ready for Ctrl-C before anything large is imported."""

import sys


def main() -> int:
    try:
        from .cli import main

        return main()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130


if __name__ == "__main__":
    sys.exit(main())
