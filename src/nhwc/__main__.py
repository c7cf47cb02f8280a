"""`python -m nhwc` is `nhwc`."""

import sys

from .cli import main

sys.exit(main())
