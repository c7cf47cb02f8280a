"""The operator table: known truths, broken operators, crashes, files, comparison."""

import dataclasses
import json
import re
import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nhwc
from nhwc.operators import (
    Difference,
    Operator,
    OperatorTable,
    Outcome,
    Row,
    Speed,
    difference,
    load_table,
)
from nhwc.operators import pool as pool_module
from nhwc.operators.entries import inventory
from nhwc.operators.inside import draws_random_numbers, first_loser, layout_copies
from nhwc.operators.samples import SHAPES, Sample, can_tell, lift
from nhwc.operators.values import difference_of

LAST = torch.channels_last

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
    """`tril` with an `out` that is channels last overruns it; a mended torch keeps it."""
    out = titled(table, "tril").row("out", 5)
    assert out.outcome in (Outcome.ERROR, Outcome.WRONG, Outcome.KEEPS, Outcome.CONVERTS)
    if out.outcome is Outcome.ERROR:
        assert "the process died (SIG" in out.example


def test_a_process_that_dies_costs_one_step(monkeypatch):
    class Fragile:
        """Dies at step 3 whenever it comes there."""

        used, started = False, 0

        def __init__(self):
            Fragile.started += 1

        def do(self, task):
            for step in ("1", "2", "3", "4"):
                if step in task.deadly:
                    task.cases.append(f"{step}: {task.deadly[step]}")
                elif step == "3":
                    raise pool_module.WorkerDied(step, "the process died (SIGSEGV)")
                else:
                    task.cases.append(step)

        def close(self):
            pass

    monkeypatch.setattr(pool_module, "Worker", Fragile)
    tasks = [pool_module.Task(name, "cpu", "float32") for name in ("a", "b")]
    told = []
    pool_module.run_tasks(tasks, 1, lambda done, title: told.append((done, title)))
    for task in tasks:
        assert task.cases[-1] == "4"
        assert "3: the process died (SIGSEGV), in float32" in task.cases
    assert told == [(1, "a"), (2, "b")]


def test_names_that_are_no_operator():
    with pytest.raises(
        nhwc.InputError, match=r"no operator 'grid_sampel'. Did you mean grid_sampl"
    ):
        nhwc.ops("grid_sampel")
    with pytest.raises(nhwc.InputError, match="torch has no dtype 'float31'"):
        nhwc.ops("relu", dtypes=("float31",))


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
    from nhwc.operators import _ops

    assert _ops._notes() == ()
    monkeypatch.setattr(_ops, "layout_copies", lambda call: ())
    assert "no copies" in _ops._notes()[0]


# Operators of one's own, registered with torch, each broken in another way.


@torch.library.custom_op("nhwc_test::loses", mutates_args=())
def loses(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape).copy_(x) * 2


@torch.library.custom_op("nhwc_test::copies", mutates_args=())
def copies(x: torch.Tensor) -> torch.Tensor:
    return (x.contiguous() * 2).contiguous(memory_format=LAST)


@torch.library.custom_op("nhwc_test::misreads", mutates_args=())
def misreads(x: torch.Tensor) -> torch.Tensor:
    """Reads memory in order whatever the strides say: right for NCHW alone."""
    flat = x.as_strided((x.numel(),), (1,))
    return torch.empty_like(x).copy_(flat.reshape(x.shape) * 2)


@torch.library.custom_op("nhwc_test::refuses", mutates_args=())
def refuses(x: torch.Tensor) -> torch.Tensor:
    if not x.is_contiguous():
        raise RuntimeError("NCHW only")
    return x * 2


@torch.library.custom_op("nhwc_test::keeps", mutates_args=())
def keeps(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("operator", "outcome", "reason"),
    [
        (loses, Outcome.LOSES, "returns contiguous 2x6x5x7"),
        (copies, Outcome.CONVERTS, "inside, .*aten::contiguous.* copies 2x6x5x7"),
        (misreads, Outcome.WRONG, "values differ"),
        (refuses, Outcome.ERROR, "NCHW only"),
        (keeps, Outcome.KEEPS, "^$"),
    ],
)
def test_broken_operators_are_told_apart(operator, outcome, reason):
    found = nhwc.check_operator(operator, torch.rand(2, 6, 5, 7))
    assert found.outcome() is outcome
    assert re.search(reason, found.reason)
    assert found.outcome("forward", 5) is Outcome.UNCHECKED


def test_a_broken_gradient_is_found():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return (grad * 2).contiguous()

    found = nhwc.check_operator(Doubled.apply, torch.rand(2, 6, 5, 7), name="doubled")
    assert found.outcome("forward") is Outcome.KEEPS
    assert found.outcome("backward") is Outcome.LOSES


def test_a_check_leaves_everything_as_it_was():
    x = torch.rand(2, 6, 5, 7, requires_grad=True)
    before, strides = torch.get_rng_state(), x.stride()
    nhwc.check_operator(torch.nn.functional.dropout, x)
    assert torch.equal(torch.get_rng_state(), before)
    assert (x.stride(), x.grad) == (strides, None)


def test_an_operator_is_timed_on_request():
    found = nhwc.check_operator(torch.relu, torch.rand(2, 6, 5, 7), timed=True)
    (speed,) = found.speeds
    assert (speed.shape, speed.dtype) == ("2x6x5x7", "float32")
    assert speed.nchw_s > 0
    assert speed.interval[0] <= speed.ratio <= speed.interval[1]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((torch.rand(2, 1, 5, 7),), "no 4-D or 5-D input there has one format"),
        ((torch.rand(3),), "no 4-D or 5-D input"),
        ((torch.rand(2, 3, 4, 4), torch.rand(9)), "fails in NCHW already: RuntimeError: The size"),
    ],
)
def test_an_operator_that_cannot_be_checked(inputs, message):
    with pytest.raises(nhwc.InputError, match=message):
        nhwc.check_operator(torch.add, *inputs)


def test_a_copy_that_nchw_needs_as_well_is_none():
    found = nhwc.check_operator(lambda x: x.permute(0, 1, 3, 2).clone(), torch.rand(2, 6, 5, 7))
    assert found.row("forward", 4).example.count("inside,") <= 1
    shuffled = nhwc.check_operator(torch.nn.functional.pixel_shuffle, torch.rand(2, 8, 5, 7), 2)
    assert shuffled.outcome() is Outcome.KEEPS


# What goes on inside a call.


def test_nested_copies_are_seen_with_their_path():
    x = torch.rand(2, 6, 5, 7).to(memory_format=LAST)
    (copy,) = layout_copies(lambda: torch.nn.functional.instance_norm(x))
    assert str(copy) == "aten::instance_norm > aten::contiguous > aten::clone copies 2x6x5x7"
    assert layout_copies(lambda: torch.relu(x)) == ()
    assert layout_copies(lambda: x.clone()) == ()
    assert layout_copies(lambda: x.contiguous(), at_least=x.numel() + 1) == ()


def test_the_first_operator_that_lets_go():
    x = torch.rand(2, 6, 5, 7).to(memory_format=LAST)
    assert first_loser(lambda: torch.tril(torch.relu(x)) + 1) == "aten::tril"
    assert first_loser(lambda: torch.relu(x)) == ""
    assert draws_random_numbers(lambda: torch.nn.functional.dropout(x))


# Values.


@pytest.mark.parametrize(
    ("expected", "got", "words"),
    [
        (torch.ones(3), torch.ones(3) + 1e-6, ""),
        (torch.ones(3), torch.tensor([1.0, 1.0, 1.5]), "1 of 3 values differ, by up to 0.5"),
        (torch.tensor([torch.nan, torch.inf]), torch.tensor([torch.nan, torch.inf]), ""),
        (torch.tensor([1.0]), torch.tensor([torch.nan]), "1 of 1 values differ, by up to 1"),
        (torch.tensor([torch.inf]), torch.tensor([-torch.inf]), "1 of 1 values differ"),
        (torch.ones(3), torch.ones(2), r"shape (2,) instead of (3,)"),
        (torch.ones(2), torch.ones(2).double(), "torch.float64 instead of torch.float32"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "1 of 2 values differ"),
        (torch.ones(2).half(), torch.ones(2).half() * 1.004, ""),
    ],
)
def test_difference_of_values(expected, got, words):
    found = difference_of([expected], [got], ties=False)
    assert found.startswith(words) if words else found == ""


def test_ties_excuse_indices_alone():
    index, other = torch.tensor([0, 1]), torch.tensor([1, 0])
    assert difference_of([index], [other], ties=True) == ""
    assert difference_of([index], [other], ties=False) != ""
    assert difference_of([torch.ones(1)], [torch.zeros(1)], ties=True) != ""


# Samples.


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.sampled_from([4, 5]),
    st.floats(-5, 5),
    st.booleans(),
)
def test_lifting_keeps_the_domain_and_the_dtype(shape, dims, low, spread):
    x = low + torch.rand(shape)
    lifted = lift(Sample(torch.relu, (x, x.clone(), 3), {}), SHAPES[dims], spread=spread)
    first, second = lifted.tensors
    assert first.ndim == second.ndim == dims
    assert first.dtype is x.dtype
    assert first.min() >= x.min() - 1e-5
    assert first.max() <= x.max() + 1e-5
    assert lifted.args[2] == 3
    if spread:
        assert can_tell(first)


def test_what_cannot_be_lifted():
    assert lift(Sample(torch.relu, (torch.rand(2, 3, 4, 5),), {}), SHAPES[4], spread=True) is None
    assert lift(Sample(torch.relu, (torch.rand(0),), {}), SHAPES[4], spread=True) is None
    assert lift(Sample(torch.relu, (3,), {}), SHAPES[4], spread=True) is None


# Tables.


def small(outcome=Outcome.KEEPS, *, dtypes=("float32",), slow=False, name="relu"):
    rows = tuple(Row(4, dtype, "forward", outcome, 1, 2, "why") for dtype in dtypes)
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
    ],
)
def test_files_that_are_no_table(tmp_path, text, error, message):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(error, match=message):
        load_table(path)
    with pytest.raises(nhwc.InputError, match="cannot read"):
        load_table(tmp_path / "missing.json")


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


def test_a_dtype_measured_once_is_no_difference():
    assert difference(small(), small(dtypes=("float32", "uint8"))) == ()


def test_slower_means_clearly_slower():
    assert small(slow=True).operators[0].slower
    assert not small().operators[0].slower


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu():
    table = nhwc.ops("nn.functional.relu", "tril", "gather", device="cuda", dtypes=("float16",))
    assert titled(table, "nn.functional.relu").outcome() is Outcome.KEEPS
    assert titled(table, "nn.functional.relu").speeds
    assert table.device == "cuda"
    assert all(rule.passed is not False for rule in nhwc.check_rules("cuda"))
