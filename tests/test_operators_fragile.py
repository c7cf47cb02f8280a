"""Work that kills its process: what is lost, what is found, and who is blamed."""

import os
import signal
import time

import pytest

from nhwc.operators import fragile as module
from nhwc.operators.fragile import Died, Fragile, Task


def test_a_death_costs_one_step():
    """Dies at step 3, whenever it comes there."""

    def work(task, enter, tell):
        for step in "1234":
            try:
                enter(step)
            except module.Crash as crash:
                tell(f"{step}: {crash}")
                continue
            if step == "3":
                os.kill(os.getpid(), signal.SIGKILL)
            tell(step)

    deadly = {}
    fragile = Fragile(work)
    words = "3: the process died (SIGKILL), in float32"
    assert fragile.do(Task("a", "cpu", "float32", deadly=deadly)) == ["1", "2", words, "4"]
    assert fragile.do(Task("a", "cpu", "uint8", deadly=deadly)) == ["1", "2", words, "4"]


def test_a_process_that_another_spoilt_is_not_held_against_an_operator():
    """The second task in a process dies; alone it lives."""
    done = []

    def work(task, enter, tell):
        enter("only")
        if done:
            os._exit(7)
        done.append(task.title)
        tell(task.title)

    fragile = Fragile(work)
    for title in ("a", "b", "c"):
        task = Task(title, "cpu", "float32")
        assert (fragile.do(task), task.deadly) == ([title], {})


def test_silence_is_a_death(monkeypatch):
    monkeypatch.setattr(module, "SILENCE_S", 0.3)

    def work(task, enter, tell):
        try:
            enter("wait")
        except module.Crash as crash:
            tell(str(crash))
        else:
            time.sleep(60)

    found = Fragile(work).do(Task("a", "cpu", "float32"))
    assert found == ["it took longer than 0 s, in float32"]


def test_what_dies_everywhere_is_given_up(monkeypatch):
    monkeypatch.setattr(module, "ATTEMPTS", 3)

    def work(task, enter, tell):
        os._exit(7)

    with pytest.raises(Died, match=r"died 3 times: the process died \(exit status 7\), in float32"):
        Fragile(work).do(Task("a", "cpu", "float32"))
