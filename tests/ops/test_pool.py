"""Operators that kill their process: the results lost and kept, and the step to blame."""

import os
import textwrap

import pytest

from nhwc._ops import pool
from nhwc._ops.pool import Died, Lane
from nhwc._ops.table import Operator
from nhwc._ops.worker import ProbeTask
from nhwc.machine.workers import Nursery


@pytest.fixture(scope="module")
def nursery(tmp_path_factory):
    """Workers that do what the title of a task says."""
    path = tmp_path_factory.mktemp("modules")
    (path / "deadly_works.py").write_text(
        textwrap.dedent(
            """
            import os, signal, time
            from nhwc._ops.worker import Crash, do_tasks

            done = []

            def dies_at_three(task, enter, tell):
                for step in "1234":
                    try:
                        enter(step)
                    except Crash as crash:
                        tell(f"{step}: {crash}")
                        continue
                    if step == "3":
                        os.kill(os.getpid(), signal.SIGKILL)
                    tell(step)

            def dies_second(task, enter, tell):
                enter("only")
                if done:
                    os._exit(7)
                done.append(task.title)
                tell(task.dtype)

            def waits(task, enter, tell):
                try:
                    enter("wait")
                except Crash as crash:
                    tell(str(crash))
                else:
                    time.sleep(60)

            def dies(task, enter, tell):
                os._exit(7)

            def warm():
                pass

            def serve(link):
                do_tasks(link, lambda task, *rest: globals()[task.title](task, *rest))
            """
        )
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(path), prepend=os.pathsep)
        with Nursery("deadly_works", threads=1) as nursery:
            yield nursery


@pytest.fixture
def lane(nursery):
    with Lane(nursery) as lane:
        yield lane


def test_a_death_costs_one_step(lane):
    deadly = {}
    words = "3: the process died (SIGKILL), in float32"
    task = ProbeTask("dies_at_three", "cpu", "float32", deadly=deadly)
    assert lane.do(task) == ["1", "2", words, "4"]
    task = ProbeTask("dies_at_three", "cpu", "uint8", deadly=deadly)
    assert lane.do(task) == ["1", "2", words, "4"]


def test_a_process_that_another_spoilt_is_not_held_against_an_operator(lane):
    """The second task in a process dies; alone it lives."""
    for dtype in ("float32", "float16", "uint8"):
        task = ProbeTask("dies_second", "cpu", dtype)
        assert (lane.do(task), task.deadly) == ([dtype], {})


def test_silence_is_a_death(lane, monkeypatch):
    monkeypatch.setattr(pool, "SILENCE_S", 0.3)
    found = lane.do(ProbeTask("waits", "cpu", "float32"))
    assert found == ["it took longer than 0 s, in float32"]


def test_what_dies_everywhere_is_given_up(lane, monkeypatch):
    monkeypatch.setattr(pool, "ATTEMPTS", 3)
    with pytest.raises(Died, match=r"died 3 times: the process died \(exit status 7\), in float32"):
        lane.do(ProbeTask("dies", "cpu", "float32"))


def test_ctrl_c_waits_for_nobody(nursery):
    """One operator is done, the other would take a minute."""

    def interrupt(done, title):
        raise KeyboardInterrupt

    works = [Operator("dies_at_three", "", ""), Operator("waits", "", "")]
    dtypes = ["float32"]
    with (
        Nursery("deadly_works", threads=1) as own,
        Lane(own) as one,
        Lane(own) as two,
        pytest.raises(KeyboardInterrupt),
    ):
        pool.measure(own, [one, two], works, "cpu", dtypes, timed=False, progress=interrupt)
