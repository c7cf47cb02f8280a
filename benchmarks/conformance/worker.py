"""The process that runs the cases of one group, with bounded memory."""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

from nhwc.plan.ledger import Ledger

from ..limits import limit_memory
from .judging import FAILED, REFUSED, WRONG, Case, Outcome, judge
from .verbs import VERBS

MEMORY = 8 << 30
"""How much a case may take, in bytes, beyond what the process had before."""


def warm(suite: str) -> None:
    import torch

    torch.set_num_threads(1)
    # Each group has a process of its own, which finds here what the suite keeps.
    importlib.import_module(suite).groups()


def serve(link: Connection) -> None:
    """Answer with the name of each case, an outcome for each verb, and None after each group.

    A request names the suite, the group and the verbs, the number of the case to begin with, and
    the verbs that this first one is asked.
    """
    limit_memory(MEMORY)
    with _own_ledger():
        while True:
            try:
                request = link.recv()
            except EOFError:
                return
            _answer(link, *request)


def _answer(
    link: Connection, suite: str, group: str, verbs: list[str], begin: int, first: list[str]
) -> None:
    module = importlib.import_module(suite)
    for number, case in enumerate(module.cases(group)):
        if number < begin:
            continue
        link.send(case.name)
        asked = first if number == begin else verbs
        judged = getattr(module, "judge", judge)
        for outcome in judged(case, {verb: VERBS[verb] for verb in asked}):
            outcome = _within_memory(outcome)
            link.send(_explained(case, outcome, getattr(module, "smaller", None)))
    link.send(None)


@contextlib.contextmanager
def _own_ledger() -> Iterator[None]:
    """Remember what is measured for this group alone: a file that all groups share grows large,
    and each case reads and writes it whole."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "times.json"
        with patch.object(Ledger, "of", lambda environment: Ledger(path)):
            yield


def _within_memory(outcome: Outcome) -> Outcome:
    """`outcome`, refused where it is for want of memory: a model may fit, but not its results."""
    short = any(words in outcome.why for words in _SHORT)
    if not short or outcome.verdict not in (WRONG, FAILED):
        return outcome
    return replace(outcome, verdict=REFUSED, why="it takes more memory than a case gets")


_SHORT = ("MemoryError", "can't allocate memory", "annot allocate memory", "bad_alloc")


def _explained(case: Case, outcome: Outcome, smaller: Callable[..., Any] | None) -> Outcome:
    """`outcome`, with the smallest case of its kind where the suite can make smaller ones."""
    if smaller is None or outcome.verdict not in (WRONG, FAILED):
        return outcome
    verb = {outcome.verb: VERBS[outcome.verb]}

    def fails(model: Any) -> bool:
        smaller_case = replace(case, model=model, made={})
        return [one.verdict for one in judge(smaller_case, verb)] == [outcome.verdict]

    return replace(outcome, why=f"{outcome.why}\n{smaller(case.model, fails).text()}")
