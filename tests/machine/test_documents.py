"""What stands in a file of nhwc's own is held against what was declared when it was written."""

import enum
from dataclasses import dataclass
from typing import Any

import pytest

from nhwc.errors import FileError, InputError
from nhwc.machine.documents import Document, misfits

DOCUMENT = Document("notes", 2, "notes", "Write others.")


class Colour(enum.Enum):
    RED = "red"


@dataclass(frozen=True)
class Note:
    text: str
    pages: tuple[int, ...] = ()
    place: tuple[str, float] | None = None
    counts: dict[str, int] | None = None
    colour: Colour = Colour.RED
    anything: Any = None


@pytest.mark.parametrize(
    "note",
    [
        Note("a", (1, 2), ("b", 0.5), {"c": 3}, Colour.RED, object()),
        Note("a", place=("b", 1)),
        Note("a", place=("b", float("nan"))),
    ],
)
def test_what_is_declared_fits(note):
    assert not list(misfits(note, Note, "note"))


@pytest.mark.parametrize(
    ("note", "wrong"),
    [
        (Note(1), "note.text is 1, not str"),
        (Note("a", [1]), "note.pages is [1], not tuple"),
        (Note("a", (1, True)), "note.pages[1] is True, not int"),
        (Note("a", (1.0,)), "note.pages[0] is 1.0, not int"),
        (Note("a", place=("b",)), "note.place has 1 items, not 2"),
        (Note("a", place=("b", float("inf"))), "note.place[1] is inf, not float"),
        (Note("a", place=("b", 10**400)), f"note.place[1] is 1{'0' * 59}, not float"),
        (Note("a", counts={1: 3}), "a key of note.counts is 1, not str"),
        (Note("a", counts={"\x1b": "3"}), r"note.counts[\x1b] is '3', not int"),
        (Note("a", colour="red"), "note.colour is 'red', not Colour"),
        ("a", "note is 'a', not Note"),
    ],
)
def test_what_is_not_is_named_with_its_place(note, wrong):
    assert next(misfits(note, Note, "note")) == wrong


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\xff", "is no JSON: .* Write others."),
        (b"[" * 100_000, "is no JSON"),
        (b'{"kind": "notes", "schema": 2, "n": NaN}', "is no JSON: NaN is no number"),
        (b"[]", "is no notes. Write others."),
        (b'{"kind": "notes", "schema": 1}', "has schema 1; this nhwc reads 2. Write others."),
        (b'{"kind": "notes", "schema": "\\u001b"}', r"has schema \\x1b; this"),
    ],
)
def test_other_files_are_refused(content, says, tmp_path):
    path = tmp_path / "notes.json"
    path.write_bytes(content)
    with pytest.raises(FileError, match=says):
        DOCUMENT.read(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InputError, match=r"no such notes: .*none\.json"):
        DOCUMENT.read(tmp_path / "none.json")
    with pytest.raises(InputError, match="cannot read"):
        DOCUMENT.read(tmp_path)
