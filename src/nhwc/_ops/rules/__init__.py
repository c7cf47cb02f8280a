"""The rules of memory formats: small programs, each with the outcome it must have."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...machine.environment import usable_device
from . import computing, strides, whole
from .rule import Drawn as Drawn
from .rule import Rule as Rule
from .rule import RuleResult as RuleResult
from .rule import Section as Section
from .rule import check

SECTIONS: tuple[Section, ...] = (*strides.SECTIONS, *computing.SECTIONS, *whole.SECTIONS)


def check_rules(
    device: torch.device | str = "cpu", sections: Sequence[Section] | None = None
) -> tuple[RuleResult, ...]:
    """Run every rule on the installed torch and this device.

    >>> check_rules(sections=SECTIONS[:1])[0].passed
    True
    """
    # A GPU that is used here for the first time has a generator from now on, which is put back.
    return check(SECTIONS if sections is None else sections, usable_device(device))
