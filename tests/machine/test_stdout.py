import ctypes
import os
import sys

import pytest

from nhwc.machine.stdout import Taken, give_back, stdout_taken


def test_it_takes_what_c_code_prints_and_puts_the_descriptor_back(capfd, monkeypatch):
    libc = ctypes.CDLL(None)
    monkeypatch.setattr(sys, "stdout", open(1, "w", closefd=False))  # noqa: SIM115
    print("before")
    libc.printf(b"c before\n")
    place = os.fstat(1).st_ino
    taken = Taken()

    def interrupted():
        with stdout_taken(taken):
            libc.printf(b"c inside\n")
            taken.mark("mark")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert sorted(taken.text.splitlines()) == [b"c inside", b"mark"]
    assert os.fstat(1).st_ino == place
    give_back(b"given back\n")
    print("after", flush=True)
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines[:2]) == ["before", "c before"]
    assert lines[2:] == ["given back", "after"]


def test_no_descriptor_is_left_open():
    before = len(os.listdir("/dev/fd"))
    with stdout_taken(Taken()):
        pass
    assert len(os.listdir("/dev/fd")) == before


def test_without_a_standard_output_it_says_so(monkeypatch):
    def closed(descriptor):
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(os, "dup", closed)
    with pytest.raises(OSError, match="Bad file descriptor"), stdout_taken(Taken()):
        pass
