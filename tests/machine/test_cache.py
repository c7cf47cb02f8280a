"""Files of the cache are used only if they are ours alone and their content fits."""

import errno
import json
import logging
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import nhwc
from nhwc._optimize.contest import _are_turns
from nhwc._optimize.verdict import recall
from nhwc.machine import cache
from nhwc.machine.cache import make_own, read_own, why_unsafe, write_own
from nhwc.machine.environment import cache_dir
from nhwc.machine.host_memory import from_file
from nhwc.plan.ledger import Ledger

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="the system has no such users")
root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away"
)
SOMEONE = 12345


@pytest.fixture(autouse=True)
def _said_anew():
    cache._say_once.cache_clear()
    yield
    cache._say_once.cache_clear()


def mode(path):
    return path.stat().st_mode & 0o777


def test_folders_and_files_are_made_for_their_owner_alone(tmp_path):
    before = os.umask(0)
    try:
        write_own(tmp_path / "a" / "b" / "c.o", b"code")
    finally:
        os.umask(before)
    assert [mode(tmp_path / one) for one in ("a", "a/b", "a/b/c.o")] == [0o700, 0o700, 0o600]
    assert read_own(tmp_path / "a" / "b" / "c.o") == b"code"
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == ["c.o"]


def open_folder(path):
    path.chmod(0o777)


def group_folder(path):
    path.chmod(0o770)


def open_file(path):
    (path / "c.o").chmod(0o666)


def linked_file(path):
    (path / "c.o").rename(path.parent / "elsewhere")
    (path / "c.o").symlink_to(path.parent / "elsewhere")


def open_parent(path):
    path.parent.chmod(0o777)


def pipe(path):
    (path / "c.o").unlink()
    os.mkfifo(path / "c.o")


def foreign_folder(path):
    os.chown(path, SOMEONE, SOMEONE)


def foreign_file(path):
    os.chown(path / "c.o", SOMEONE, SOMEONE)


def foreign_parent(path):
    os.chown(path.parent, SOMEONE, SOMEONE)


def foreign_link(path):
    path.rename(path.parent / "real")
    path.symlink_to(path.parent / "real")
    os.chown(path, SOMEONE, SOMEONE, follow_symlinks=False)


def link_through_an_open_folder(path):
    there = path.parent / "open"
    there.mkdir()
    path.rename(there / "real")
    path.symlink_to(there / "real")
    there.chmod(0o777)


@pytest.mark.parametrize(
    "change",
    [
        *(open_folder, group_folder, open_file, linked_file, open_parent, pipe),
        link_through_an_open_folder,
        *(
            pytest.param(change, marks=root)
            for change in (foreign_folder, foreign_file, foreign_parent, foreign_link)
        ),
    ],
)
def test_what_others_may_have_written_is_not_read(tmp_path, change):
    path = tmp_path / "own" / "kernels"
    write_own(path / "c.o", b"code")
    assert read_own(path / "c.o") == b"code"
    change(path)
    assert read_own(path / "c.o") is None


@pytest.mark.parametrize("change", [open_folder, group_folder, open_parent])
def test_nothing_is_written_where_others_may_write(tmp_path, change):
    folder = tmp_path / "parent" / "kernels"
    write_own(folder / "c.o", b"code")
    change(folder)
    write_own(folder / "d.o", b"code")
    assert [one.name for one in folder.iterdir()] == ["c.o"]


def test_a_folder_that_another_process_makes_meanwhile_is_used(tmp_path, monkeypatch):
    (tmp_path / "plans").mkdir(mode=0o700)
    monkeypatch.setattr(cache.os.path, "lexists", lambda path: path != tmp_path / "plans")
    assert make_own(tmp_path / "plans")


def test_a_file_that_the_disk_cannot_read_is_none(tmp_path, monkeypatch):
    class Broken:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            os.close(self.handle)

        def read(self):
            raise OSError(5, "Input/output error")

    def fdopen(handle, mode):
        broken = Broken()
        broken.handle = handle
        return broken

    write_own(tmp_path / "own" / "c.o", b"code")
    monkeypatch.setattr(cache.os, "fdopen", fdopen)
    assert read_own(tmp_path / "own" / "c.o") is None


def test_places_on_the_way_end_also_where_links_lead_in_a_circle(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="more than 40 links"):
        cache._places(tmp_path / "a" / "c")


def test_a_place_above_another_is_looked_at_behind_a_link(tmp_path):
    """`link/../own` lies beside what the link leads to."""
    (tmp_path / "open" / "far").mkdir(parents=True)
    (tmp_path / "open" / "own").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "open" / "far")
    assert make_own(tmp_path / "link" / ".." / "own")
    (tmp_path / "open").chmod(0o777)
    assert not make_own(tmp_path / "link" / ".." / "own")


def test_a_link_to_a_folder_of_ones_own_is_used(tmp_path):
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "again").symlink_to(tmp_path / "link")
    for name in ("link", "again"):
        write_own(tmp_path / name / f"{name}.o", b"code")
        assert read_own(tmp_path / "real" / f"{name}.o") == b"code"


def test_a_folder_for_all_like_tmp_may_lie_above(tmp_path):
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o1777)
    assert make_own(tmp_path / "tmp" / "own")
    assert not make_own(tmp_path / "tmp")
    (tmp_path / "tmp").chmod(0o777)
    assert "others can write to" in why_unsafe(tmp_path / "tmp" / "own")


def test_one_line_says_why_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("NHWC_CACHE", str(tmp_path / "c\x1b[2J"))
    write_own(tmp_path / "c\x1b[2J" / "plans" / "a", b"1")
    (tmp_path / "c\x1b[2J").chmod(0o777)
    with caplog.at_level(logging.WARNING, "nhwc"):
        for name in ("plans", "kernels", "plans"):
            assert read_own(tmp_path / "c\x1b[2J" / name / "a") is None
            write_own(tmp_path / "c\x1b[2J" / name / "b", b"2")
    [record] = caplog.records
    assert "others can write to" in record.getMessage()
    assert record.getMessage().isprintable()


def in_the_way(folder, monkeypatch):
    folder.write_text("a file")
    return "Not a directory"


def full_disk(folder, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache, "replace_file", full)
    return "No space left on device"


@pytest.mark.parametrize("cause", [in_the_way, full_disk])
def test_one_line_says_that_nothing_can_be_kept(cause, tmp_path, caplog, monkeypatch):
    monkeypatch.setenv("NHWC_CACHE", str(tmp_path / "cache"))
    cache._say_once.cache_clear()
    says = cause(tmp_path / "cache", monkeypatch)
    with caplog.at_level(logging.WARNING, "nhwc"):
        for name in ("plans", "kernels", "plans"):
            assert read_own(tmp_path / "cache" / name / "a") is None
            write_own(tmp_path / "cache" / name / "a", b"1")
    [record] = caplog.records
    assert f"{tmp_path}/cache cannot be written: {says}. Kernels are" in record.getMessage()


def test_a_file_in_place_of_a_folder_of_the_cache_is_told(tmp_path, caplog):
    cache._say_once.cache_clear()
    (tmp_path / "plans").write_text("a file")
    write_own(tmp_path / "plans" / "a", b"1")
    assert "cannot be written: Not a directory." in caplog.text


@pytest.mark.parametrize(
    "place", ["file", "file/below", "/dev/null", "/proc/none", "gone", "a\0b", "loop"]
)
def test_a_place_that_is_none_costs_only_the_memory(tmp_path, monkeypatch, place):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    folder = Path(place) if place.startswith("/") else tmp_path / place
    assert read_own(folder / "plans" / "a") is None
    write_own(folder / "plans" / "a", b"1")
    assert from_file([b"\0" * (1 << 23)], 1 << 23, folder) is None
    if "\0" not in place:
        monkeypatch.setenv("NHWC_CACHE", str(folder))
        x = torch.randn(1, 3, 8, 8)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
        with torch.no_grad():
            torch.testing.assert_close(nhwc.optimize(model, x)(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_file_too_large_to_be_ours_is_not_read(tmp_path):
    write_own(tmp_path / "own" / "a", b"1" * 100)
    assert read_own(tmp_path / "own" / "a", largest=99) is None


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000, b"\0", b"NaN"]
)
def test_a_memory_of_anything_else_is_an_empty_one(tmp_path, content):
    write_own(tmp_path / "plans" / "m.json", content)
    assert Ledger(tmp_path / "plans" / "m.json").get("a") is None


HOSTILE = [
    None,
    True,
    0,
    -1,
    1e999,
    "x",
    [],
    {},
    [[]],
    {"a": 1},
    [None],
    10**400,
    float("nan"),
    "\x1b",
]


@pytest.mark.parametrize("value", HOSTILE, ids=str)
def test_entries_of_other_kinds_are_no_entries(tmp_path, value):
    crafted = (value, [value, value], [[value], [value]], [[0.5], [value]], [[0.5], [0.5, 0.5]])
    assert not any(_are_turns(one, 2) for one in crafted)
    ledger = Ledger(tmp_path / "m.json")
    check = {
        "input": 0,
        "output": "",
        "error": 0.0,
        "eager_error": 0.0,
        "allowed": 1.0,
        "reason": "",
        "in_float64": True,
    }
    known = {"kernels": "k", "checks": [check], "constant": False}
    for key, entry in (
        ("whole", value),
        ("checks", known | {"checks": value}),
        ("check", known | {"checks": [value]}),
        ("error", known | {"checks": [check | {"error": value}]}),
        ("more", known | {"checks": [check | {"more": value}]}),
    ):
        ledger.put(f"verified {key}", entry)
        assert recall(ledger, key, "k") is None, key
    ledger.put("verified right", known)
    assert recall(ledger, "right", "k").passed


@pytest.mark.parametrize(
    "value", [None, True, "x", [[0.5], ["y"]], {"a": []}, 1e999, -1.0, [1, 2, 3]]
)
@torch.no_grad()
def test_a_memory_with_all_its_entries_replaced_costs_measuring_alone(value, monkeypatch, tmp_path):
    monkeypatch.setenv("NHWC_CACHE", str(tmp_path / "own"))
    shared = Path(os.environ["NHWC_CACHE"])
    x = torch.randn(1, 3, 12, 12)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU()).eval()
    nhwc.optimize(model, x)
    [file] = (shared / "plans").iterdir()
    data = json.loads(file.read_bytes())
    data["entries"] = dict.fromkeys(data["entries"], value)
    write_own(file, json.dumps(data).encode())
    torch.testing.assert_close(nhwc.optimize(model, x)(x), model(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_without_a_home_nothing_is_kept(monkeypatch):
    for name in ("NHWC_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(number):
        raise KeyError(number)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert not make_own(cache_dir())
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), torch.randn(1, 3, 12, 12)
    torch.testing.assert_close(nhwc.optimize(model, x)(x), model(x), rtol=1e-4, atol=1e-4)
