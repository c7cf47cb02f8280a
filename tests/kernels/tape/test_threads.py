"""Tapes on torch's threads: all steps, in order, for callers in threads and in forked children."""

import ctypes
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from nhwc.kernels.language.compiler import Kernel
from nhwc.kernels.tape import handover
from nhwc.kernels.tape import threads as regions
from nhwc.kernels.tape.walk import MOST_PARTS, Tape, parts_each

STEPS = 50


def _shift(e, a, thread, threads):
    """y[i] = x[i + 1] + 1: reads what another thread wrote in the step before."""
    begin, end = e.share(a.count, thread, threads)
    with e.range(begin, end) as i:
        other = e.read(a.x.floats() + (i + 1) % a.count)
        e.write(other + 1.0, a.y.floats() + i)


SHIFT = Kernel("shift", ("x", "y", "count"), _shift)


COUNT = 64


def tape_on(x, threads, each=1):
    """A tape that shifts the numbers of `x` round `STEPS` times, by way of another tensor.

    In every second phase each thread has `each` parts.
    """
    y = torch.zeros(COUNT)
    args = [(ctypes.c_int64 * 3)(a.data_ptr(), b.data_ptr(), COUNT) for a, b in ((x, y), (y, x))]
    phases = [[(SHIFT.address, ctypes.addressof(args[i % 2]))] for i in range(STEPS)]
    tape = Tape(phases, threads, [each, 1] * (STEPS // 2))
    tape.used = y, args
    return tape


def walk(each=1):
    x = torch.arange(float(COUNT))
    tape_on(x, torch.get_num_threads(), each).run()
    return x


def right(walks=1):
    return (torch.arange(float(COUNT)) + walks * STEPS) % COUNT + walks * STEPS


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("each", [1, 3, MOST_PARTS])
def test_every_step_sees_the_one_before(threads, count, each):
    threads(count)
    for _ in range(20):
        assert torch.equal(walk(each), right())


def test_many_callers_at_once(threads):
    threads(2)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: walk(), range(40)))
    assert all(torch.equal(result, right()) for result in results)


def test_without_openmp(threads, monkeypatch):
    monkeypatch.setattr(regions, "find_openmp", lambda: None)
    threads(3)
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(lambda _: walk(), range(6)))
    assert all(torch.equal(result, right()) for result in results)


def test_a_thread_that_comes_late_finds_its_work_done(monkeypatch):
    """Threads that begin after one another: the first does all, and soon does not ask the rest."""
    asked = []

    def one_after_the_other(function, args, threads):
        call = regions._call(function)
        return lambda: asked.append([call(args, i, threads, i) for i in range(threads)])

    monkeypatch.setattr(regions, "region", one_after_the_other)
    x = torch.arange(float(COUNT))
    tape = tape_on(x, 3, each=4)
    for _ in range(12):
        tape.run()
    assert torch.equal(x, right(walks=12))
    assert len(asked) == 4  # the first time, and after 1, 2 and 4 walks alone


def _sign(e, a, part, parts):
    """Count the part, and note how many there are and who does it."""
    place = a.y.integers() + part * 3
    e.write(e.read(place) + 1, place)
    e.write(parts, place + 1)
    e.write(a.worker, place + 2)


SIGN = Kernel("test_sign", ("y",), _sign)


def test_who_is_done_with_its_own_parts_does_those_of_others(monkeypatch):
    def second_thread_alone(function, args, threads):
        return lambda: regions._call(function)(args, 1, threads, 1)

    monkeypatch.setattr(regions, "region", second_thread_alone)
    signed = torch.zeros(12, 3, dtype=torch.int64)
    args = (ctypes.c_int64 * 1)(signed.data_ptr())
    Tape([[(SIGN.address, ctypes.addressof(args))]], 3, each=[4]).run()
    assert signed.tolist() == [[1, 12, 1]] * 12


def test_no_work_is_cut_into_more_parts_than_it_has_pieces_for():
    for pieces in range(200):
        for count in range(1, 9):
            each = parts_each(pieces, count)
            assert 1 <= each <= MOST_PARTS
            assert each == 1 or (each - 1) * count < pieces


def mapped():
    return regions._mapped_libraries()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_second_library_is_loaded():
    torch.ones(100000).sum()
    before = mapped()
    found = regions.find_openmp()
    walk()
    assert mapped() == before
    assert found is not None
    assert "torch" in found.path


FORK = """
import os, torch
from tests.kernels.tape.test_threads import walk, right
torch.set_num_threads(2)
assert torch.equal(walk(), right())
children = []
for _ in range(2):
    child = os.fork()
    if child == 0:
        good = all(torch.equal(walk(), right()) for _ in range(3))
        os._exit(0 if good else 1)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
assert torch.equal(walk(), right())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_children_may_call():
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr


def test_the_time_from_core_to_core_is_known_only_where_two_compute(threads, monkeypatch):
    # Two thousand turns take two cores at once; one turn is handed over on any that are left, as
    # soon as a busy host leaves any.
    monkeypatch.setattr(handover, "_TURNS", 1)
    threads(1)
    assert handover.handover_seconds() is None
    threads(2)
    ends = time.monotonic() + 60
    while (seconds := handover.handover_seconds()) is None and time.monotonic() < ends:
        pass
    assert seconds is not None
    assert seconds > 0
