"""Run one call in NCHW and in NHWC, and say what happened to the format and to the values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats import CHANNELS_LAST_OF, Format, format_of
from ..machine.whole import whole_float32
from ..models.preserve import seed_generators
from ..models.trees import storage_of
from .cases import Observation
from .forms import Form, Prepared, backward, forward, in_place, with_out
from .inside import LayoutCopy, draws_random_numbers, first_loser, layout_copies
from .samples import (
    Enter,
    Layout,
    Sample,
    all_but_first,
    can_tell,
    channels_last,
    contiguous,
    describe,
    enter_all,
    first_alone,
    first_sliced,
)
from .table import Outcome
from .values import difference_of

UNINITIALIZED = ("empty_like", "new_empty", "new_empty_strided", "resize_", "resize_as_")
"""Operators that return uninitialized memory, whose values are not compared."""


def probe(name: str, sample: Sample, enter: Enter = enter_all) -> Iterator[Observation]:
    """Yield a case for every aspect that this sample can show; none where it fails in NCHW."""
    judge = _Judge(name, sample, enter)
    plain = judge.right("forward", forward)
    if plain is None:
        return
    yield judge("forward", forward, channels_last, plain)
    for aspect, form, possible in (
        ("backward", backward, sample.differentiable),
        ("in-place", in_place, sample.inplace is not None),
    ):
        if possible and (right := judge.right(aspect, form)) is not None:
            yield judge(aspect, form, channels_last, right)
    if sample.takes_out and plain:
        # The right values do not depend on the layout of `out`: the reference's is contiguous.
        plainly = with_out(plain, contiguous)
        if (right := judge.right("out", plainly)) is not None:
            yield judge("out", with_out(plain, channels_last), channels_last, right)
            yield judge("out", plainly, channels_last, right, Format.CONTIGUOUS)
    if sum(map(can_tell, sample.tensors)) > 1:
        yield judge("mixed", forward, first_alone, plain)
        yield judge("mixed", forward, all_but_first, plain)
    yield judge("slice", forward, first_sliced, plain)


def _results(prepared: Prepared, seed: int) -> list[Tensor]:
    seed_generators(seed)
    with torch.no_grad(), whole_float32():
        results = prepared.call()
    if any(result.is_cuda for result in results):
        torch.cuda.synchronize()  # An error of the device shows at the next wait, wherever it is.
    return results


def _is_random(sample: Sample) -> bool:
    if draws_random_numbers(forward(sample, contiguous).call):
        return True
    # A custom operator may draw random numbers without carrying torch's tag.
    runs = [_results(forward(sample, contiguous), seed=seed) for seed in (0, 1)]
    return bool(difference_of(*runs, ties=False))


def _has_ties(sample: Sample) -> bool:
    first = sample.tensors[0]
    return int(first.detach().unique().numel()) < first.numel()


@dataclass(frozen=True)
class _Judge:
    """Calls one form of a sample in both layouts, and compares."""

    name: str
    sample: Sample
    enter: Enter

    def right(self, aspect: str, form: Form) -> list[Tensor] | None:
        """Return the form's results in NCHW; None if it already fails there."""
        try:
            self.enter(f"{self.sample.dims}-D {aspect} NCHW")
            return _results(form(self.sample, contiguous), seed=0)
        except Exception:
            return None

    def __call__(
        self,
        aspect: str,
        form: Form,
        layout: Layout,
        right: list[Tensor],
        wanted: Format | None = None,
    ) -> Observation:
        setting = _SETTINGS.get((aspect, layout), "")
        if wanted:
            setting = "out is contiguous, the input channels last"
        try:
            self.enter(f"{self.sample.dims}-D {aspect} NHWC {setting}".strip())
            outcome, words = self._compare(form, layout, right, wanted)
        except Exception as error:
            outcome, words = Outcome.ERROR, f"{type(error).__name__}: {_first_line(error)}"
        known = outcome in (Outcome.KEEPS, Outcome.VIEW, Outcome.NONE)
        parts = [] if known else [describe(self.sample), setting, words]
        return Observation(self.sample.dims, aspect, outcome, "; ".join(filter(None, parts)))

    def _compare(
        self, form: Form, layout: Layout, right: list[Tensor], wanted: Format | None
    ) -> tuple[Outcome, str]:
        prepared = form(self.sample, layout)
        given = {storage_of(tensor) for tensor in prepared.laid}
        results: list[Tensor] = []
        copies = layout_copies(
            lambda: results.extend(_results(prepared, seed=0)), _half(prepared.laid)
        )
        wrong = self._wrong(right, results)
        if wrong:
            return Outcome.WRONG, wrong
        outcome, words = self._format(results, given, wanted)
        copy = self._extra(copies, form)
        if outcome is Outcome.LOSES:
            culprit = first_loser(form(self.sample, layout).call)
            words = f"{culprit or 'it'} returns {words}"
        elif copy and outcome is not Outcome.VIEW:
            outcome = Outcome.CONVERTS
        if copy:
            words = "; ".join(filter(None, (words, f"inside, {copy}")))
        return outcome, words

    def _wrong(self, expected: list[Tensor], results: list[Tensor]) -> str:
        """Say how the values differ; random and uninitialized ones may."""
        if not difference_of(expected, results, ties=False):
            return ""
        if self.name in UNINITIALIZED or _is_random(self.sample):
            return ""
        return difference_of(expected, results, ties=_has_ties(self.sample))

    def _extra(self, copies: Sequence[LayoutCopy], form: Form) -> LayoutCopy | None:
        """Return the first copy that reorders a whole tensor, if NCHW makes fewer such copies."""
        if not copies:
            return None
        prepared = form(self.sample, contiguous)
        plain = layout_copies(lambda: _results(prepared, seed=0), _half(prepared.laid))
        return copies[0] if len(copies) > len(plain) else None

    def _format(
        self, results: list[Tensor], given: set[int], wanted: Format | None
    ) -> tuple[Outcome, str]:
        dims = self.sample.dims
        wanted = wanted or CHANNELS_LAST_OF[dims]
        seen = Outcome.NONE
        for result in results:
            if result.ndim != dims or not can_tell(result):
                continue
            found = format_of(result)
            if found is wanted:
                seen = Outcome.KEEPS
            elif storage_of(result) in given or _is_broadcast(result):
                seen = Outcome.VIEW if seen is Outcome.NONE else seen
            else:
                shape = "x".join(map(str, result.shape))
                return Outcome.LOSES, f"{_NAMES[found]} {shape}, strides {result.stride()}"
        return seen, ""


_NAMES = {
    Format.CONTIGUOUS: "contiguous",
    Format.OTHER: "neither format in",
    Format.AMBIGUOUS: "ambiguous",
    Format.CHANNELS_LAST: "channels last",
    Format.CHANNELS_LAST_3D: "channels last",
}

_SETTINGS: dict[tuple[str, Layout], str] = {
    ("mixed", first_alone): "first operand channels last, the others contiguous",
    ("mixed", all_but_first): "first operand contiguous, the others channels last",
    ("slice", first_sliced): "a channel slice of a channels-last tensor",
}


def _half(tensors: Sequence[Tensor]) -> int:
    """The size from which a copy counts as that of a whole tensor, not of indices or statistics."""
    return min((tensor.numel() for tensor in tensors), default=2) // 2


def _is_broadcast(tensor: Tensor) -> bool:
    return any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:130]
