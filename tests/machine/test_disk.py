"""A file is written whole or not at all: under kills, on a full disk, in a crowd."""

import errno
import json
import multiprocessing
import os
import random
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import nhwc
from nhwc._train.checkpoint import load_checkpoint, save_checkpoint
from nhwc._train.metrics import MetricsLog
from nhwc._train.progress import Point
from nhwc.cli.outputs import write_file
from nhwc.machine import disk
from nhwc.machine.cache import read_own, write_own
from nhwc.machine.disk import replace_file
from nhwc.machine.documents import Document
from nhwc.plan.ledger import Ledger
from nhwc.zoo.weights import read_weights

linux = pytest.mark.skipif(sys.platform != "linux", reason="made with limits of Linux")
_SIZE = 1 << 20


@pytest.fixture(params=["unnamed", "named"])
def way(request, monkeypatch):
    """Both ways of writing: not every system has files without a name."""
    if request.param == "named":
        monkeypatch.setattr(disk, "_UNNAMED", 0)
    return request.param


def _content(letter):
    return bytes([letter]) * _SIZE


def _write_for_ever(folder):
    for number in range(1 << 30):
        letter = 65 + number % 26
        replace_file(
            folder / "report", [_content(letter)[: _SIZE // 2], _content(letter)[_SIZE // 2 :]]
        )
        write_own(folder / "cache" / "entry", _content(letter))
        ledger = Ledger(folder / "cache" / "ledger.json")
        ledger.put(f"entry {number % 500}", [letter] * 50)
        ledger.save()


@linux
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_kill_at_any_moment_leaves_whole_files(tmp_path, way):
    draw = random.Random(0)
    for _ in range(12):
        child = multiprocessing.get_context("fork").Process(target=_write_for_ever, args=[tmp_path])
        child.start()
        time.sleep(draw.uniform(0.005, 0.06))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        for content in [
            (tmp_path / "report").read_bytes() if (tmp_path / "report").exists() else None,
            read_own(tmp_path / "cache" / "entry"),
        ]:
            assert content is None or content == _content(content[0])
        ledger = tmp_path / "cache" / "ledger.json"
        assert not ledger.exists() or json.loads(ledger.read_bytes())["entries"]
    if way == "unnamed":
        # A kill between naming and renaming leaves a file, which is whole.
        left = [path for path in tmp_path.rglob(".nhwc-*") if path.stat().st_size != _SIZE]
        assert [path for path in left if not _is_json(path)] == []


def _is_json(path):
    try:
        return bool(json.loads(path.read_bytes()))
    except ValueError:
        return False


def test_the_umask_and_the_longest_name_are_heeded(tmp_path, way):
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / ("n" * 255), [b"1"])
        replace_file(tmp_path / "own", [b"2"], private=True)
    finally:
        os.umask(before)
    modes = {path.name[:3]: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"nnn": 0o640, "own": 0o600}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
def test_what_a_user_names_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch, way):
    kept = []
    monkeypatch.setattr(os, "fsync", lambda handle: kept.append(sorted(tmp_path.glob("*.txt"))))
    replace_file(tmp_path / "a.txt", [b"text"])
    replace_file(tmp_path / "b.txt", [b"text"], private=True)
    assert kept == [[]]


def test_what_a_user_names_is_replaced_behind_its_link_and_a_pipe_stays_one(tmp_path):
    file, link, pipe = (tmp_path / name for name in ("model", "link", "pipe"))
    link.symlink_to(file)
    os.mkfifo(pipe)
    _saved(file)
    _saved(link)
    with ThreadPoolExecutor() as pool:
        read = pool.submit(pipe.read_bytes)
        _saved(pipe)
    assert link.is_symlink()
    assert not file.is_symlink()
    assert pipe.is_fifo()
    assert len(read.result()) == file.stat().st_size


@pytest.mark.skipif(not os.path.exists("/dev/stdout"), reason="no /dev/stdout")
def test_standard_output_is_written_into(tmp_path):
    """It may be a pipe, which has no name, or a log with earlier lines."""
    log, link = tmp_path / "log", tmp_path / "link"
    # As /dev/stdout is made; the test does not risk the one of the machine.
    link.symlink_to("/proc/self/fd/1" if os.path.exists("/proc/self/fd") else "/dev/fd/1")
    log.write_text("earlier\n")
    code = (
        "from nhwc.cli.outputs import Path, check_outputs, write_file;"
        f"link = Path({str(link)!r}); check_outputs(link);"
        "write_file(link, b'said\\n'); print('later')"
    )
    with log.open("a") as stream:
        subprocess.run([sys.executable, "-c", code], stdout=stream, check=True)
    assert log.read_text() == "earlier\nsaid\nlater\n"
    piped = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    assert piped.stdout == b"said\nlater\n"


def _saved(path):
    nhwc.save(nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3)).eval(), path)


def _checkpointed(path):
    save_checkpoint(path, {"state_dict": {"weight": torch.zeros(100_000)}})


def _reported(path):
    write_file(path, bytes(100_000))


@linux
@pytest.mark.parametrize("write", [_saved, _checkpointed, _reported])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path, write, way):
    path = tmp_path / "file"
    path.write_bytes(b"as it was")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(nhwc.NhwcError, match=r"cannot write .*file: File too large") as error:
            write(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(error.value)
    assert path.read_bytes() == b"as it was"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


@linux
def test_a_disk_that_fills_up_in_training_is_one_line(tmp_path, monkeypatch):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    (tmp_path / "metrics.csv").symlink_to("/dev/full")
    monkeypatch.setattr("nhwc._train.metrics._tensorboard", lambda folder: None)
    full = pytest.raises(nhwc.InputError, match=r"cannot write to .*: No space left on device")
    with full, MetricsLog(tmp_path) as log:
        log.add(_point())


def _point():
    fields = dict.fromkeys(Point.__dataclass_fields__, 0)
    return Point(**{**fields, "phase": "train"})


def test_a_full_disk_costs_the_cache_alone(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    write_own(tmp_path / "entry", b"as it was")
    monkeypatch.setattr(os, "replace", full)
    write_own(tmp_path / "entry", b"new")
    assert read_own(tmp_path / "entry") == b"as it was"
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


def test_a_crowd_on_one_file_never_sees_half_of_it(tmp_path, way):
    """Sixteen threads write and read one entry: each reads what one of them wrote."""
    wrong = []

    def work(number):
        for _ in range(20):
            write_own(tmp_path / "entry", bytes([number]) * 10_000)
            found = read_own(tmp_path / "entry")
            if found is None or found != found[:1] * 10_000:
                wrong.append(found)

    threads = [threading.Thread(target=work, args=[number]) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert [path.name for path in tmp_path.iterdir()] == ["entry"]


@pytest.mark.parametrize("seconds", [0, 2**33])
def test_clocks_and_dates_of_files_mean_nothing(tmp_path, monkeypatch, seconds):
    monkeypatch.setattr(time, "time", lambda: 0.0)
    path = tmp_path / "ledger.json"
    for number in range(2):
        ledger = Ledger(path)
        ledger.put(f"conv2d {number}", 0.5)
        ledger.save()
        os.utime(path, (seconds, seconds))
    assert [Ledger(path).get(f"conv2d {number}") for number in range(2)] == [0.5, 0.5]


def test_a_checkpoint_that_memory_cannot_hold_is_not_called_damaged(tmp_path, monkeypatch):
    (tmp_path / "c.pt").write_bytes(b"whole")

    def full(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9")

    monkeypatch.setattr(torch, "load", full)
    with pytest.raises(RuntimeError, match="allocate memory"):
        load_checkpoint(tmp_path / "c.pt")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
@pytest.mark.parametrize(
    "make",
    [os.mkfifo, os.mkdir, lambda path: path.symlink_to(path), lambda p: p.symlink_to("/dev/zero")],
    ids=["pipe", "folder", "loop", "device"],
)
@pytest.mark.parametrize(
    "read", [nhwc.load, load_checkpoint, read_weights, Document("a", 1, "a", "Write it.").read,
             lambda path: nhwc.load_model(str(path))],
    ids=["load", "checkpoint", "weights", "document", "model"],
)  # fmt: skip
def test_what_is_no_file_is_refused_and_nobody_is_waited_for(tmp_path, make, read):
    path = tmp_path / "a"
    make(path)
    with pytest.raises(nhwc.NhwcError) as refused:
        read(path)
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
def test_a_document_may_come_through_a_pipe(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    content = json.dumps({"kind": "a", "schema": 1, "rows": [0] * 100_000}).encode()
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    writer = threading.Thread(target=pipe.write_bytes, args=[content])
    writer.start()
    while not select.select([reader], [], [], 0)[0]:
        time.sleep(0.01)
    assert len(Document("a", 1, "a", "Write it.").read(pipe)["rows"]) == 100_000
    writer.join()
    os.close(reader)
