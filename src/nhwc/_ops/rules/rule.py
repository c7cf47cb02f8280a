"""What a rule is, and how it is checked: run its program, compare what its last line says.

A program is text, so that a page can show the very lines that ran. Its last line is an expression,
whose value is the outcome. Tensors with names of one letter are drawn, in the order in which they
got their names. `same(y, z)` is the format of y if its values are those of z.
"""

from __future__ import annotations

import ast
import contextlib
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...displayed import Displayed
from ...formats import Format, convert_, format_of
from ...machine.whole import whole_float32
from ...models.preserve import seed_generators, undrawn
from ...pictures import Memory, memory_of


@dataclass(frozen=True)
class Rule:
    """A claim, the outcome that it must have, and the program that has it.

    An error is an outcome too, written as `RuntimeError: its first line`.
    """

    claim: str
    expected: object
    program: str
    elsewhere: object = None
    """The outcome on other processors, or on a GPU, where it is theirs."""
    needs_cuda: bool = False
    names: tuple[tuple[str, str], ...] = ()
    """What the dimensions of a tensor are called, where it is not what torch calls them."""


@dataclass(frozen=True)
class Section:
    """Rules of one subject."""

    title: str
    rules: tuple[Rule, ...]


@dataclass(frozen=True)
class Drawn:
    """A tensor of a program: its name there, its memory, and how it came from the one before."""

    name: str
    memory: Memory
    came: str

    def to_dict(self) -> dict[str, object]:
        return {"name": self.name, "memory": self.memory.to_dict(), "came": self.came}


@dataclass(frozen=True)
class RuleResult(Displayed):
    """A rule's claim and what was measured; `passed` is None where it could not be tried."""

    section: str
    claim: str
    program: str
    expected: str
    measured: str
    passed: bool | None
    elsewhere: str = ""
    drawn: tuple[Drawn, ...] = ()

    def to_dict(self) -> dict[str, object]:
        return {**self.__dict__, "drawn": [drawn.to_dict() for drawn in self.drawn]}


def check(sections: Iterable[Section], device: torch.device) -> tuple[RuleResult, ...]:
    """Run every rule on this device; the state of the random numbers is left alone."""
    with undrawn(), torch.no_grad(), whole_float32():
        return tuple(
            _check(rule, section.title, device) for section in sections for rule in section.rules
        )


def _check(rule: Rule, section: str, device: torch.device) -> RuleResult:
    names = {**KNOWN}
    passed: bool | None
    try:
        if rule.needs_cuda and not torch.cuda.is_available():
            raise _CannotTry("no CUDA device")
        outcome = str(_outcome(rule.program, names, device))
    except _CannotTry as reason:
        outcome, passed = f"not tried: {reason}", None
    else:
        passed = outcome in (str(rule.expected), str(rule.elsewhere))
    elsewhere = "" if rule.elsewhere is None else str(rule.elsewhere)
    drawn = tuple(_drawn(rule, names))
    return RuleResult(
        section, rule.claim, rule.program, str(rule.expected), outcome, passed, elsewhere, drawn
    )


class _CannotTry(Exception):
    """This machine lacks something that the rule needs."""


_LACKED = ("compiler", "compile error", "triton")
"""Words of torch's where there is no compiler, or there are no headers of Python's for it."""


def _outcome(program: str, names: dict[str, Any], device: torch.device) -> object:
    *lines, last = ast.parse(program).body
    assert isinstance(last, ast.Expr)
    seed_generators(0)
    # A mode that makes tensors elsewhere is in the way of compilers, so the CPU does without.
    place = device if device.type != "cpu" else contextlib.nullcontext()
    try:
        with place, warnings.catch_warnings():
            # Scripting and tracing are deprecated; the rules cover them as long as torch has them.
            warnings.simplefilter("ignore")
            exec(compile(ast.Module(lines, []), "rule", "exec"), names)
            return eval(compile(ast.Expression(last.value), "rule", "eval"), names)
    except Exception as error:
        words = str(error).strip().splitlines() or [""]
        if "compile(" in program and any(w in str(error).lower() for w in _LACKED):
            raise _CannotTry(f"torch.compile: {words[0]}") from error
        return f"{type(error).__name__}: {words[0]}"
    finally:
        if "compile(" in program:
            torch.compiler.reset()


def same(result: Tensor, reference: Tensor) -> Format | str:
    """Return the format of `result` if its values equal the reference's, else 'wrong values'.

    >>> same(torch.ones(2, 3, 4, 4), torch.zeros(2, 3, 4, 4))
    'wrong values'
    """
    kinds = [tensor.dtype for tensor in (result, reference) if tensor.is_floating_point()]
    allowed = max([1e-3, *(4 * torch.finfo(kind).eps for kind in kinds)])
    close = torch.allclose(result.float(), reference.float(), rtol=allowed, atol=allowed)
    return format_of(result) if close and result.shape == reference.shape else "wrong values"


KNOWN: dict[str, Any] = {
    "torch": torch,
    "nn": nn,
    "F": F,
    "convert_": convert_,
    "format_of": format_of,
    "same": same,
}
"""The names that a program may use."""


def _drawn(rule: Rule, names: dict[str, Any]) -> Iterable[Drawn]:
    found: dict[str, Tensor] = {}
    for line in ast.parse(rule.program).body:
        used = [node for node in ast.walk(line) if isinstance(node, ast.Name)]
        read = [node.id for node in used if node.id in found]
        for name in [node.id for node in used if isinstance(node.ctx, ast.Store)]:
            tensor = names.get(name)
            if len(name) == 1 and isinstance(tensor, Tensor) and name not in found:
                memory = memory_of(tensor, dict(rule.names).get(name, ""))
                yield Drawn(name, memory, _came(tensor, read, found))
                found[name] = tensor


def _came(tensor: Tensor, read: list[str], found: dict[str, Tensor]) -> str:
    """Say what a tensor has of the memory of those before it, the ones it was made from first."""
    for name in (*read, *found):
        if tensor.untyped_storage().data_ptr() == found[name].untyped_storage().data_ptr():
            if (tensor.stride(), tensor.shape) == (found[name].stride(), found[name].shape):
                return f"the memory of {name}, unchanged"
            return f"a view of the memory of {name}: nothing was copied"
    if not read:
        return ""
    source = found[read[0]]
    if tensor.shape != source.shape or same(tensor, source) == "wrong values":
        return "new numbers, in memory of their own"
    order = "the same" if memory_of(tensor).order == memory_of(source).order else "another"
    return f"the numbers of {read[0]}, copied in {order} order"
