"""Tables of operators: their files, and what differs between two."""

import dataclasses
import json

import pytest
import torch

import nhwc
from nhwc._ops import (
    Difference,
    Operator,
    OperatorTable,
    Outcome,
    Speed,
    Tally,
    difference,
    load_table,
)


def small(outcome=Outcome.KEEPS, *, dtypes=("float32",), slow=False, name="relu"):
    rows = tuple(Tally(4, dtype, "forward", outcome, 1, 2, "why") for dtype in dtypes)
    high = 0.6 if slow else 1.1
    speed = Speed("case", "8x64x56x56", "float32", 1.0, 1.0, 0.5 if slow else 1.0, (0.4, high))
    op = Operator(name, "", "pointwise", rows, (speed,))
    return OperatorTable(nhwc.Environment.here().to_dict(), "cpu", dtypes, (op,), {"mv": "1-D"})


def test_a_table_survives_its_file(tmp_path):
    table = dataclasses.replace(small(dtypes=("float32", "uint8")), notes=("a note",), seconds=1.5)
    path = tmp_path / "table.json"
    path.write_text(table.to_json())
    assert load_table(path) == table
    assert json.loads(table.to_json())["schema"] == 1
    assert table.to_json().count('"forward"') == 1


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("{", nhwc.FileError, "is no JSON"),
        ("[]", nhwc.FileError, "is no table of operators"),
        ('{"schema": 1}', nhwc.FileError, "is no table of operators"),
        ('{"kind": "nhwc operators", "schema": 9}', nhwc.FileError, "schema 9; this nhwc reads 1"),
        ('{"kind": "nhwc operators", "schema": 1}', nhwc.FileError, "is damaged"),
        (
            json.dumps(small().to_dict() | {"operators": {}}),
            nhwc.FileError,
            "operators are no list",
        ),
        (json.dumps(small().to_dict() | {"dtypes": "float32"}), nhwc.FileError, "are no list"),
    ],
)
def test_files_that_are_no_table(tmp_path, text, error, message):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(error, match=message):
        load_table(path)
    with pytest.raises(nhwc.InputError, match="no such table of operators"):
        load_table(tmp_path / "missing.json")


def test_an_aspect_that_there_is_not_is_refused(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(small().to_json().replace('"forward"', '"sideways"'))
    with pytest.raises(nhwc.FileError, match="there is no aspect 'sideways'"):
        load_table(path)


def test_difference_between_tables():
    old, new = small(), small(Outcome.LOSES, slow=True)
    assert difference(old, old) == ()
    assert difference(old, new) == (
        Difference("relu", "forward", 4, "float32", "keeps", "loses"),
        Difference("relu", "speed, case", 4, "float32", "not slower in NHWC", "slower in NHWC"),
    )
    assert difference(old, small(name="gelu")) == (
        Difference("gelu", "", 0, "", "absent", "listed"),
        Difference("relu", "", 0, "", "listed", "absent"),
    )


def test_speeds_that_changed_are_told_in_order_and_with_their_dimensions():
    cases = [f"{n} groups" for n in range(1, 9)]

    def timed(slow):
        table = small(slow=slow)
        (op,) = table.operators
        (speed,) = op.speeds
        clip = dataclasses.replace(speed, shape="2x32x8x28x28")
        speeds = tuple(dataclasses.replace(clip, case=case) for case in reversed(cases))
        return dataclasses.replace(table, operators=(dataclasses.replace(op, speeds=speeds),))

    found = difference(timed(False), timed(True))
    assert [change.aspect for change in found] == [f"speed, {case}" for case in cases]
    assert {change.dims for change in found} == {5}


def test_a_dtype_measured_once_is_no_difference():
    assert difference(small(), small(dtypes=("float32", "uint8"))) == ()


def test_slower_means_clearly_slower():
    assert small(slow=True).operators[0].slower
    assert not small().operators[0].slower


def test_names_in_a_list_are_refused():
    with pytest.raises(nhwc.InputError, match="names are given one by one"):
        nhwc.ops(["relu"])


@pytest.mark.parametrize("dtypes", [(torch.float32,), "float32", ()])
def test_dtypes_that_are_no_names_are_refused(dtypes):
    with pytest.raises(nhwc.InputError, match=r"^dtypes are names in a tuple"):
        nhwc.ops("relu", dtypes=dtypes)
