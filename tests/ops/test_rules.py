"""The rules of memory formats hold here, and one that does not is reported."""

import ast

import pytest
import torch

from nhwc._ops import check_rules
from nhwc._ops.rules import SECTIONS, Rule, Section
from nhwc._ops.rules.rule import KNOWN, same

ALL = [rule for section in SECTIONS for rule in section.rules]
X = "x = torch.rand(2, 3, 4, 5)\n"


@pytest.fixture(scope="module")
def found():
    return check_rules()


def checked(*rules):
    return check_rules(sections=[Section("a section", rules)])


def test_every_rule_holds(found):
    assert [(rule.claim, rule.measured) for rule in found if rule.passed is False] == []
    assert sum(rule.passed is True for rule in found) >= len(ALL) - 2
    assert len({rule.claim for rule in found}) == len(ALL)


def test_every_rule_that_makes_a_tensor_is_drawn(found):
    for rule in found:
        named = [line.partition(" = ")[0] for line in rule.program.splitlines() if " = " in line]
        letters = [name for name in dict.fromkeys(named) if len(name) == 1]
        if rule.passed is not None:
            assert [tensor.name for tensor in rule.drawn] == letters, rule.claim


def test_programs_use_no_name_that_a_reader_does_not_know():
    for rule in ALL:
        names = [node for node in ast.walk(ast.parse(rule.program)) if isinstance(node, ast.Name)]
        stored = {node.id for node in names if isinstance(node.ctx, ast.Store)}
        assert {node.id for node in names} <= stored | {*KNOWN, "tuple"}


def test_a_rule_that_fails_says_what_it_found():
    wrong, raised, lacking = checked(
        Rule("wrong", "contiguous", "'channels_last'"),
        Rule("raises", True, "int('first\\nsecond')"),
        Rule("lacks", True, "True", needs_cuda=not torch.cuda.is_available()),
    )
    assert (wrong.passed, wrong.measured, wrong.expected) == (False, "channels_last", "contiguous")
    assert raised.passed is False
    assert raised.measured.startswith("ValueError: invalid literal")
    if not torch.cuda.is_available():
        assert (lacking.passed, lacking.measured) == (None, "not tried: no CUDA device")


def test_an_outcome_of_other_processors_passes_and_is_marked():
    mine, theirs, neither = checked(
        *(Rule("a", 1, program, elsewhere=2) for program in ("1", "2", "3"))
    )
    assert [rule.passed for rule in (mine, theirs, neither)] == [True, True, False]
    assert {rule.elsewhere for rule in (mine, theirs, neither)} == {"2"}


@pytest.mark.parametrize(
    ("line", "came"),
    [
        ("y = x.contiguous()", "the memory of x, unchanged"),
        ("y = x[:, 1:]", "a view of the memory of x: nothing was copied"),
        ("y = x.clone()", "the numbers of x, copied in the same order"),
        ("y = x.mT.contiguous().mT", "the numbers of x, copied in another order"),
        ("y = x + 1", "new numbers, in memory of their own"),
        ("y = torch.rand(2, 3, 4, 5)", ""),
    ],
)
def test_what_an_operation_did_to_memory(line, came):
    [rule] = checked(Rule("a", True, f"{X}{line}\nTrue"))
    assert [tensor.came for tensor in rule.drawn] == ["", came]


def test_rules_leave_the_random_numbers_alone():
    before = torch.get_rng_state()
    checked(*ALL[:3])
    assert torch.equal(torch.get_rng_state(), before)


def test_wrong_values_fail_a_rule():
    assert same(torch.ones(2, 3, 4, 4), torch.ones(2, 3, 4, 4) * 2) == "wrong values"
