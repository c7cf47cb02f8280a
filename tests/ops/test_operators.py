"""The verb, measuring torch itself: known truths, crashes, what is reported where torch differs."""

import sys
import types

import pytest
import torch

import nhwc
from nhwc._ops import Outcome, check_rules
from nhwc._ops._ops import _check_names
from nhwc._ops.entries import inventory
from nhwc.errors import InputError

TRUTHS = {
    "nn.functional.grid_sample": Outcome.LOSES,
    "nn.functional.instance_norm": Outcome.LOSES,
    "nn.functional.fractional_max_pool2d": Outcome.LOSES,
    "tril": Outcome.LOSES,
    "triu": Outcome.LOSES,
    "nn.functional.pad (circular)": Outcome.LOSES,
    "nn.functional.pad (constant)": Outcome.KEEPS,
    "nn.functional.max_pool2d": Outcome.KEEPS,
    "nn.functional.batch_norm": Outcome.KEEPS,
    "nn.functional.group_norm": Outcome.KEEPS,
    "nn.functional.interpolate (nearest)": Outcome.KEEPS,
    "nn.functional.interpolate (bilinear)": Outcome.KEEPS,
    "nn.functional.conv2d": Outcome.KEEPS,
    "nn.functional.relu": Outcome.KEEPS,
    "nn.functional.unfold": Outcome.CONVERTS,
    "permute": Outcome.VIEW,
    "view": Outcome.ERROR,
    "nn.Conv2d": Outcome.KEEPS,
    "nn.InstanceNorm2d": Outcome.LOSES,
}
"""What torch on a CPU is known to do, forward, in float32."""


@pytest.fixture(scope="module")
def table():
    names = sorted({title.partition(" ")[0] for title in TRUTHS} | {"add", "conv1d", "dropout"})
    return nhwc.ops(*names, dtypes=("float32",), timed=False)


def titled(table, title):
    return next(op for op in table.operators if op.title == title)


@pytest.mark.parametrize("title", TRUTHS)
def test_known_truths(table, title):
    assert titled(table, title).outcome() is TRUTHS[title], titled(table, title).reason


def test_the_reason_names_who_lost_it(table):
    assert (
        "aten::grid_sampler_2d returns contiguous"
        in titled(table, "nn.functional.grid_sample").reason
    )
    assert (
        "aten::instance_norm > aten::contiguous"
        in titled(table, "nn.functional.instance_norm").reason
    )


def test_backward_and_mixed_operands_are_their_own_rows(table):
    bicubic = titled(table, "nn.functional.interpolate (bicubic)")
    assert bicubic.outcome("forward") is Outcome.KEEPS
    assert bicubic.outcome("backward") is Outcome.LOSES
    mixed = titled(table, "add").row("mixed", 4)
    assert (mixed.outcome, mixed.cases, mixed.of) == (Outcome.SOMETIMES, 1, 2)
    assert mixed.example.startswith("2x19x5x7, 2x19x5x7; first operand contiguous")


def test_random_numbers_are_no_wrong_values(table):
    assert titled(table, "nn.functional.dropout").outcome() is Outcome.KEEPS


def test_what_has_no_image_is_left_out_with_the_reason(table):
    assert "nn.functional.conv1d" in table.left_out
    assert "4-D" in table.left_out["nn.functional.conv1d"]


def test_an_operator_that_kills_its_process_is_in_the_table(table):
    """`tril` with an `out` that is channels last overruns it, and what is beyond may be anything:
    the process dies or hangs. A mended torch keeps it."""
    out = titled(table, "tril").row("out", 5)
    assert out.outcome in (Outcome.ERROR, Outcome.WRONG, Outcome.KEEPS, Outcome.CONVERTS)
    if out.outcome is Outcome.ERROR:
        assert "the process died (SIG" in out.example or "it took longer than" in out.example


def test_names_that_are_no_operator():
    with pytest.raises(
        nhwc.InputError, match=r"no operator 'grid_sampel'. Did you mean grid_sampl"
    ):
        nhwc.ops("grid_sampel")
    with pytest.raises(nhwc.InputError, match="torch has no dtype 'float31'"):
        nhwc.ops("relu", dtypes=("float31",))


def test_a_worker_that_does_not_start_is_reported(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(nhwc.NhwcError, match=r"died \(exit status 1\): .* Try: python -c"):
        nhwc.ops("relu")


def test_what_cannot_be_loaded_is_reported(monkeypatch):
    name = "torch.testing._internal.common_methods_invocations"
    monkeypatch.setitem(sys.modules, name, None)
    entries, problems = inventory()
    assert "cannot be imported" in problems["torch.testing OpInfo database"]
    assert "nn.functional.conv2d" in entries, "our own calls remain"

    broken = types.ModuleType(name)
    broken.op_db = [object()]
    monkeypatch.setitem(sys.modules, name, broken)
    entries, problems = inventory()
    assert any("cannot be read: AttributeError" in reason for reason in problems.values())


def test_where_the_profiler_shows_no_copies_the_table_says_so(monkeypatch):
    from nhwc._ops import _ops

    assert _ops._notes() == ()
    monkeypatch.setattr(_ops, "layout_copies", lambda call: ())
    assert "no copies" in _ops._notes()[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu():
    table = nhwc.ops("nn.functional.relu", "tril", "gather", device="cuda", dtypes=("float16",))
    assert titled(table, "nn.functional.relu").outcome() is Outcome.KEEPS
    assert titled(table, "nn.functional.relu").speeds
    assert table.device == "cuda"
    assert all(rule.passed is not False for rule in check_rules("cuda"))


def test_a_name_that_is_not_known_because_a_database_is_missing():
    problems = {"torch.testing OpInfo database": "cannot be imported: No module named 'expecttest'"}
    with pytest.raises(InputError, match=r"'tril' is not known: .*pip install 'nhwc\[ops\]'\.$"):
        _check_names(["tril"], [], [], problems)
