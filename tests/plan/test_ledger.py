"""The memory of measurements: kept, shared, and never in the way."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from nhwc.machine.environment import Environment
from nhwc.plan.ledger import Ledger


@pytest.fixture
def path(tmp_path):
    return tmp_path / "plans" / "machine.json"


def test_what_was_saved_is_there_for_the_next(path):
    ledger = Ledger(path)
    ledger.put("layer", {"onednn": 0.5})
    assert ledger.measured == 1
    ledger.save()
    again = Ledger(path)
    assert again.get("layer") == {"onednn": 0.5}
    assert again.measured == 0
    assert again.get("another") is None


def test_what_is_replaced_is_not_called_new(path):
    ledger = Ledger(path)
    ledger.put("layer", 1)
    ledger.save()
    assert not ledger.has_new("layer")
    ledger.put("layer", 2)
    assert (ledger.measured, ledger.renewed) == (0, 1)
    assert ledger.has_new("layer")


def test_nothing_new_is_not_written(path):
    Ledger(path).save()
    assert not path.exists()


def test_entries_that_are_no_mapping_are_none(path):
    ledger = Ledger(path)
    ledger.put("layer", 1)
    ledger.save()
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "entries": ["layer"]}))
    assert Ledger(path).get("layer") is None


def test_what_is_forgotten_is_measured_again_and_replaced(path):
    ledger = Ledger(path)
    ledger.put("layer", 1)
    ledger.put("other", 2)
    ledger.save()
    again = Ledger(path)
    again.forget()
    assert again.get("layer") is None
    again.put("layer", 3)
    again.save()
    assert (Ledger(path).get("layer"), Ledger(path).get("other")) == (3, 2)


def test_two_users_of_a_file_lose_nothing(path):
    first, second = Ledger(path), Ledger(path)
    first.put("a", 1)
    second.put("b", 2)
    first.save()
    second.save()
    both = Ledger(path)
    assert (both.get("a"), both.get("b")) == (1, 2)


def test_many_writers_leave_a_readable_file(path):
    def work(number):
        ledger = Ledger(path)
        ledger.put(f"layer {number}", number)
        ledger.save()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert json.loads(path.read_text())["entries"]
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe\x00", b"[]", b"3", b'{"schema": 99, "entries": {"a": 1}}',
     b'{"schema": 1, "entries": [1]}', b'{"schema": 1}'],
)  # fmt: skip
def test_a_damaged_file_is_ignored_and_rewritten(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    ledger = Ledger(path)
    assert ledger.get("a") is None
    ledger.put("a", 2)
    ledger.save()
    assert Ledger(path).get("a") == 2


def test_a_place_that_cannot_be_written_costs_only_the_memory(tmp_path):
    (tmp_path / "plans").write_text("a file where the folder should be")
    ledger = Ledger(tmp_path / "plans" / "machine.json")
    ledger.put("a", 1)
    ledger.save()
    ledger.put("b", 2)
    ledger.save()
    assert (ledger.get("a"), ledger.get("b")) == (1, 2)


def test_the_file_belongs_to_the_environment_and_to_the_kernels(monkeypatch, tmp_path):
    monkeypatch.setenv("NHWC_CACHE", str(tmp_path))
    here = Environment.here()
    found = Ledger.of(here).path
    assert found.parent == tmp_path / "plans"
    assert found.name.startswith(f"{here.key}-")
    assert Ledger.of(replace(here, threads=here.threads + 1)).path != found
    monkeypatch.setenv("NHWC_ISA", "plain")
    other = Ledger.of(here).path
    names = {found, other}
    # Kernels are made by the files of one folder, and put to use by those of another.
    for made, used in (("other", "own"), ("other", "other")):
        one = lambda *folder, made=made, used=used: used if folder else made
        monkeypatch.setattr("nhwc.plan.ledger.sources", one)
        names.add(Ledger.of(here).path)
    assert len(names) == 4


@pytest.mark.parametrize(("name", "told_apart"), [("AMD EPYC", True), ("Ryzen 7 9700X", False)])
def test_processors_that_hide_behind_one_name_are_told_apart(name, told_apart, monkeypatch):
    keys = set()
    for family in (25, 26):
        text = f"processor\t: 0\ncpu family\t: {family}\nmodel\t\t: 1\nmodel name\t: {name}\n"
        monkeypatch.setattr("pathlib.Path.read_text", lambda self, text=text: text)
        keys.add(Environment.here().key)
    assert (len(keys) == 2) is told_apart
