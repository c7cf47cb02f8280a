"""An assertion for a user's test suite; `nhwc.pytest_plugin` has it as a fixture."""

from __future__ import annotations

from typing import Any

from torch import nn

from ._audit import Audit, audit
from .render.audit_text import audit_text
from .shown import printable


def assert_keeps_format(model: nn.Module, *inputs: Any, **options: Any) -> None:
    """Fail, with the audit as the message, if an operator of `model` drops channels last.

    >>> import torch
    >>> assert_keeps_format(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.rand(2, 3, 8, 8))

    `options` are those of `nhwc.audit`.
    """
    # pytest leaves this frame out of the traceback it prints.
    __tracebackhide__ = True
    assert_kept(audit(model, *inputs, **options))


def assert_kept(report: Audit, note: str = "") -> None:
    """Fail, with the audit and `note` as the message, if an operator in it drops channels last."""
    __tracebackhide__ = True
    if report.lost:
        places = f"{len(report.lost)} place{'s lose' if len(report.lost) > 1 else ' loses'}"
        raise AssertionError(printable(f"{places} channels last\n{audit_text(report)}{note}"))
