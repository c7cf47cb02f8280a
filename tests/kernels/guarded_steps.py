"""A program for test_bounds: random steps on buffers that end, or begin, at a forbidden page."""

import random
import sys

from . import block_cases, step_cases
from .guarded import guarded


def main():
    choose = random.Random(1)
    for number in range(int(sys.argv[1])):
        for maker in (*step_cases.MAKERS, *block_cases.MAKERS):
            case = maker(choose)
            at_end = number % 2 == 0
            case.check(step_cases.run(case, choose, 1, lambda v, end=at_end: guarded(v, end)))
    print("all inside")


if __name__ == "__main__":
    main()
