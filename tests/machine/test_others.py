"""What other programs take of the processor is told from what this one takes."""

import os
import subprocess
import sys

import pytest

from nhwc.machine import others
from nhwc.machine.others import Others, watch_others

_WORK = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)"
_START = "import subprocess, sys; subprocess.{how}([sys.executable, '-c', sys.argv[1]])"

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts")


@pytest.mark.parametrize("generations", [1, 2])
def test_what_descends_from_this_process_is_no_other(generations):
    """Ticks are counted where they stand: with the process or, once it has ended, its parent."""
    before = others._own_ticks()
    start = [_START.format(how="run")] if generations == 2 else []
    subprocess.run([sys.executable, "-c", *start, _WORK], check=True)
    assert others._own_ticks() - before >= 0.2 * _TICKS


def test_an_orphan_is_another():
    """What a program does that no longer descends from this one counts as that of others."""
    before = others._others_s()
    start = [sys.executable, "-c", _START.format(how="Popen"), _WORK]
    # The output ends when the orphan has written, and ended.
    assert subprocess.run(start, check=True, stdout=subprocess.PIPE).stdout == b"done\n"
    assert others._others_s() - before >= 0.2


def test_what_cannot_be_read_is_not_told(monkeypatch, tmp_path):
    monkeypatch.setattr(others, "_PROC", tmp_path)
    monkeypatch.setattr(others, "_SHORTEST_S", 0.0)
    assert watch_others()() is None


def test_a_processs_name_may_hold_anything(monkeypatch, tmp_path):
    (tmp_path / "7").mkdir()
    name = "a) S 1 (b"
    (tmp_path / "7" / "stat").write_text(f"7 ({name}) S 3 " + "0 " * 9 + "1 2 3 4 20 0\n")
    monkeypatch.setattr(others, "_PROC", tmp_path)
    assert dict(others._processes()) == {7: (3, 10)}


@pytest.mark.parametrize(
    ("taken", "cores", "threads", "is_told"),
    [
        (0.1, 2, 2, False),
        (0.5, 2, 2, True),
        (0.9, 2, 1, False),
        (1.9, 2, 1, True),
        (30, 64, 16, False),
    ],
)
def test_they_are_in_the_way_where_threads_have_no_core(taken, cores, threads, is_told):
    assert Others(taken, cores).in_the_way_of(threads) is is_told
