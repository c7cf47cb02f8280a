"""Processes that work for others: asked, heard, and ended with all that they started."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from nhwc.errors import NhwcError
from nhwc.machine.workers import Ended, Nurseries, Nursery

PATIENCE_S = 120.0

MODULE = """
import os, signal, subprocess, sys, time

warmed = []

def warm(*words):
    warmed.append((os.getpid(), words))

def start_child():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid

def serve(link):
    while True:
        try:
            request = link.recv()
        except EOFError:
            return
        if request == "facts":
            names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NHWC_WORD")
            link.send({"pid": os.getpid(), "parent": os.getppid(), "session": os.getsid(0),
                       "group": os.getpgrp(), "warmed": warmed,
                       "environment": [os.environ.get(name) for name in names]})
        elif request == "print":
            print("to stdout")
            os.system("echo and this from a child")
            link.send("printed")
        elif request == "child":
            link.send(start_child())
        elif request == "sleep":
            time.sleep(600)
        elif request == "leave":
            link.send(start_child())
            return
        elif isinstance(request, int):
            print("first words", file=sys.stderr)
            print("  last words  ", file=sys.stderr, flush=True)
            os._exit(request) if request >= 0 else os.kill(os.getpid(), -request)
        else:
            link.send(request)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("modules")
    (path / "made_up_worker.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(path), prepend=os.pathsep)
        yield path


@pytest.fixture(scope="module")
def nursery(folder):
    with Nursery(
        "made_up_worker", "a", "b", threads=3, environment={"NHWC_WORD": "given"}
    ) as nursery:
        yield nursery


@pytest.fixture
def worker(nursery):
    with nursery.worker() as worker:
        yield worker


def ask(worker, request):
    worker.send(request)
    return worker.hear(PATIENCE_S)


def lives(number):
    """Whether such a process exists; a zombie that nobody waits for does not."""
    try:
        with open(f"/proc/{number}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(number):
    deadline = time.monotonic() + 60
    while lives(number):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_values_of_any_size_and_bytes(worker):
    for value in ({"a": [1, 2.5, None]}, b"x" * 3_000_000, "text"):
        assert ask(worker, value) == value


def test_threads_and_environment_are_given(worker):
    assert ask(worker, "facts")["environment"] == ["3", "3", "given"]


def test_forked_workers_share_what_was_warmed_once(nursery):
    with nursery.worker() as one, nursery.worker() as two:
        first, second = ask(one, "facts"), ask(two, "facts")
    assert first["pid"] != second["pid"]
    assert first["warmed"] == second["warmed"] == [(first["parent"], ("a", "b"))]


def test_a_fresh_worker_warms_itself(folder):
    with Nursery("made_up_worker", "a", threads=1, warm=False) as cold, cold.worker() as worker:
        facts = ask(worker, "facts")
        assert facts["warmed"] == [(facts["pid"], ("a",))]
        child = ask(worker, "child")
    wait_until_gone(child)


def test_ctrl_c_in_the_terminal_reaches_no_worker(worker):
    facts = ask(worker, "facts")
    assert facts["session"] != os.getsid(0)
    assert facts["group"] == facts["pid"]


def test_what_is_printed_disturbs_no_answer(worker):
    assert ask(worker, "print") == "printed"
    assert ask(worker, "still here") == "still here"


@pytest.mark.parametrize(
    ("request_", "how", "hint"),
    [
        (7, "the process died (exit status 7)", ""),
        (0, "the process died (exit status 0)", ""),
        (-signal.SIGSEGV, "the process died (SIGSEGV)", ""),
        (-signal.SIGKILL, "the process died (SIGKILL)", ", out of memory?"),
    ],
)
def test_a_death_is_told_with_its_last_words(worker, request_, how, hint):
    for _ in range(2):
        worker.send(int(request_))
        with pytest.raises(Ended) as caught:
            worker.hear(PATIENCE_S)
        assert caught.value.how == how
        assert str(caught.value) == f"{how}{hint}: last words"
    assert isinstance(caught.value, NhwcError)


def test_who_is_silent_is_ended_with_its_children(worker):
    number, child = ask(worker, "facts")["pid"], ask(worker, "child")
    assert lives(child)
    worker.send("sleep")
    with pytest.raises(Ended, match=r"^it took longer than 0 s$"):
        worker.hear(0.05)
    assert not lives(number)
    wait_until_gone(child)


def test_who_leaves_by_itself_leaves_no_children(nursery):
    with nursery.worker() as worker:
        child = ask(worker, "leave")
    wait_until_gone(child)


def test_a_worker_is_gone_behind_its_block(nursery):
    with nursery.worker() as worker:
        number = ask(worker, "facts")["pid"]
    assert not lives(number)
    worker.end()
    with pytest.raises(Ended):
        ask(worker, "facts")


def test_who_waits_is_told_when_all_is_closed(folder):
    told = []

    def wait():
        try:
            ask(worker, "sleep")
        except Ended as end:
            told.append(end.how)

    with Nursery("made_up_worker", threads=1) as own:
        worker = own.worker()
        number = ask(worker, "facts")["pid"]
        thread = threading.Thread(target=wait)
        thread.start()
        own.close()
        thread.join(60)
    assert told[0].startswith("the process died")
    assert not lives(number)


def test_a_nursery_that_is_not_warm_yet_ends_at_once(folder, tmp_path):
    """Importing torch can take half a minute on a busy machine; Ctrl-C does not wait for it."""
    begun, warm = tmp_path / "begun", tmp_path / "warm"
    (folder / "slow_worker.py").write_text(
        "import pathlib, time\n"
        "def warm(begun, warm):\n"
        "    pathlib.Path(begun).touch()\n"
        "    time.sleep(20)\n"
        "    pathlib.Path(warm).touch()\n"
    )
    with Nursery("slow_worker", str(begun), str(warm), threads=1):
        while not begun.exists():
            time.sleep(0.01)
    assert not warm.exists()


@pytest.mark.parametrize("warm", [True, False])
def test_a_module_that_cannot_be_imported(warm):
    with (
        Nursery("no_such_worker", threads=1, warm=warm) as nursery,
        pytest.raises(Ended, match=r"\(exit status 1\): .* No module named 'no_such_worker'"),
        nursery.worker() as worker,
    ):
        ask(worker, "facts")


def test_workers_end_with_whoever_asked_for_them(folder):
    code = """
        import os, signal, sys
        from nhwc.machine.workers import Nursery

        nursery = Nursery("made_up_worker", threads=1)
        worker = nursery.worker()
        worker.send("facts")
        print(worker.hear(120)["pid"])
        worker.send("child")
        print(worker.hear(120))
        worker.send("sleep")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    for number in done.stdout.split():
        wait_until_gone(int(number))


def test_one_nursery_for_each_number_of_threads_and_a_new_one_for_one_that_died(folder):
    with Nurseries("made_up_worker") as nurseries:
        first = nurseries.of(1)
        assert nurseries.of(1) is first
        second = nurseries.of(2)
        assert second is not first
        with first.worker() as worker:
            parent = ask(worker, "facts")["parent"]
        os.kill(parent, signal.SIGKILL)
        with pytest.raises(Ended, match="the process that starts workers died"):
            first.worker()
        with nurseries.of(1).worker() as worker:
            assert ask(worker, "facts")["environment"][0] == "1"
        assert not second.has_died
    assert second.has_died
