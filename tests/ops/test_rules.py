"""The rules of memory formats hold here, and one that does not is reported."""

import torch

from nhwc._ops import check_rules
from nhwc._ops.rules import RULES, CannotTry


def test_every_rule_holds():
    found = check_rules()
    assert [rule.claim for rule in found if rule.passed is False] == []
    assert sum(rule.passed is True for rule in found) >= len(RULES) - 2
    assert len({rule.claim for rule in found}) == len(RULES)


def test_a_rule_that_fails_says_what_it_found():
    def raises(ground):
        raise ValueError("first line\nsecond")

    def lacks(ground):
        raise CannotTry("no such device")

    rules = (
        ("wrong", "contiguous", lambda g: "channels_last"),
        ("raises", True, raises),
        ("lacks", True, lacks),
    )
    wrong, raised, lacking = check_rules(rules=rules)
    assert (wrong.passed, wrong.measured, wrong.expected) == (False, "channels_last", "contiguous")
    assert (raised.passed, raised.measured) == (False, "ValueError: first line")
    assert (lacking.passed, lacking.measured) == (None, "not tried: no such device")


def test_rules_leave_the_random_numbers_alone():
    before = torch.get_rng_state()
    check_rules()
    assert torch.equal(torch.get_rng_state(), before)


def test_wrong_values_fail_a_rule():
    from nhwc._ops.rules import same

    assert same(torch.ones(2, 3, 4, 4), torch.ones(2, 3, 4, 4) * 2) == "wrong values"
