"""The right answer of a model: its float64 run, and how far eager float32 strays from it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from ..errors import InputError
from ..machine.crowd import one_thread_if_crowded
from ..models.trees import flatten
from ..verify.widened import run_in_float64, widened
from .step import StepCall

FACTOR = 20.0
"""An engine's error may be this many times eager's, because engines sum in other orders."""

ROUGH = 5e-2
"""The error allowed in mixed precision, and at most in float32: beyond it, answers are random."""


@dataclass(frozen=True)
class Truth:
    """The output tensors of the float64 run, in order, and the largest error that passes."""

    outputs: tuple[numpy.ndarray, ...]
    allowed: float

    def error_of(self, output: Any) -> float:
        """The largest difference over the largest true value; infinite where shapes differ."""
        found = arrays_of(output)
        if [a.shape for a in found] != [a.shape for a in self.outputs]:
            return float("inf")
        return max(map(_difference, found, self.outputs), default=0.0)

    def save(self, path: Path) -> None:
        numpy.savez(path, numpy.array(self.allowed), *self.outputs)

    @classmethod
    def load(cls, path: Path) -> Truth:
        with numpy.load(path, allow_pickle=False) as file:
            allowed, *outputs = (file[f"arr_{i}"] for i in range(len(file.files)))
        return cls(tuple(outputs), float(allowed))


@one_thread_if_crowded()
def find_truth(
    model: nn.Module, inputs: Sequence[Tensor], *, train: bool = False, amp: bool = False
) -> Truth:
    """Run a model in float32, and a copy of it in float64.

    >>> truth = find_truth(nn.Linear(3, 2), [torch.ones(1, 3)])
    >>> truth.allowed >= 1e-5
    True
    """
    answer = _train_once if train else _infer

    def exactly(wide: nn.Module) -> tuple[numpy.ndarray, ...]:
        return arrays_of(answer(wide, [x.double() for x in inputs]))

    own, exact = arrays_of(answer(model, inputs)), None
    # A forward not written for float64 may raise anything; then eager's answer is the truth.
    with contextlib.suppress(Exception):
        exact = exactly(widened(model)) if train else run_in_float64(model, exactly)
    if exact is None:
        return Truth(own, ROUGH if amp else 1e-3)
    eager = Truth(exact, 0.0).error_of(list(own))
    if eager > ROUGH:
        what, remedy = (
            ("step", "Give more images, or larger ones (--batch, --input).")
            if train
            else ("answer", "Give trained weights (--weights), or take out what draws numbers.")
        )
        raise InputError(
            f"eager's own {what} is {eager:.1e} off its float64 run: no {what} can be told right "
            f"or wrong. {remedy}"
        )
    return Truth(exact, ROUGH if amp else min(ROUGH, max(1e-5, FACTOR * eager)))


def arrays_of(output: Any) -> tuple[numpy.ndarray, ...]:
    """Every tensor or array in nested lists, tuples and dictionaries, in order, as float64."""
    leaves = (leaf for _, leaf in flatten(output))
    return tuple(_wide(leaf) for leaf in leaves if isinstance(leaf, (Tensor, numpy.ndarray)))


def _wide(leaf: Tensor | numpy.ndarray) -> numpy.ndarray:
    if isinstance(leaf, Tensor):
        leaf = leaf.detach().resolve_conj()
        parts = torch.view_as_real(leaf) if leaf.is_complex() else leaf
        return parts.to("cpu", torch.float64).numpy()
    if numpy.iscomplexobj(leaf):
        leaf = numpy.stack([leaf.real, leaf.imag], axis=-1)
    return leaf.astype(numpy.float64)


def _difference(found: numpy.ndarray, exact: numpy.ndarray) -> float:
    finite = numpy.isfinite(exact)
    # Scores that are masked are infinite by right: such a number is right where it is the same.
    if not numpy.array_equal(found[~finite], exact[~finite], equal_nan=True):
        return float("inf")
    if not numpy.isfinite(found[finite]).all():
        return float("inf")
    scale = float(numpy.abs(exact[finite]).max(initial=0.0))
    return float(numpy.abs(found[finite] - exact[finite]).max(initial=0.0)) / (scale or 1.0)


def _infer(model: nn.Module, inputs: Sequence[Tensor]) -> Any:
    with torch.inference_mode():
        return model(*inputs)


def _train_once(model: nn.Module, inputs: Sequence[Tensor]) -> Any:
    return StepCall(model, model, tuple(inputs)).check()
