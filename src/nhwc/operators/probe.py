"""Run one call in NCHW and in NHWC, and say what became of the format and of the numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..formats import CHANNELS_LAST_OF, Format, format_of
from .inside import LayoutCopy, draws_random_numbers, first_loser, layout_copies
from .samples import (
    Enter,
    Layout,
    Sample,
    all_but_first,
    arrange,
    can_tell,
    channels_last,
    contiguous,
    describe,
    enter_all,
    first_alone,
    first_sliced,
    tensors_in,
)
from .table import Case, Outcome
from .values import difference_of

UNINITIALIZED = ("empty_like", "new_empty", "new_empty_strided", "resize_", "resize_as_")
"""Operators whose numbers mean nothing."""


@dataclass(frozen=True)
class Prepared:
    """A call ready to be made, and the tensors that were laid out for it."""

    call: Callable[[], list[Tensor]]
    laid: list[Tensor]


Form = Callable[[Sample, Layout], Prepared]
"""One form of an operator: as a function, in place, its gradient, or with `out=`."""


def forward(sample: Sample, layout: Layout) -> Prepared:
    args, kwargs, laid = arrange(sample, layout, grad=False)
    return Prepared(lambda: tensors_in(sample.call(*args, **kwargs)), laid)


def in_place(sample: Sample, layout: Layout) -> Prepared:
    assert sample.inplace is not None
    return forward(replace(sample, call=sample.inplace), layout)


def backward(sample: Sample, layout: Layout) -> Prepared:
    """The gradient of every floating result, asked for with gradients that are channels last.

    `autograd.grad` is called rather than `backward`, which would restride the gradients.
    """
    args, kwargs, laid = arrange(sample, layout, grad=True)
    with torch.enable_grad():
        results = [r for r in tensors_in(sample.call(*args, **kwargs)) if r.requires_grad]
    wanted = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
    given = [_gradient_like(result, layout) for result in results]

    def call() -> list[Tensor]:
        grads = torch.autograd.grad(results, wanted, given, allow_unused=True)
        return [grad for grad in grads if grad is not None]

    return Prepared(call, [*laid, *given])


def _gradient_like(result: Tensor, layout: Layout) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    kind = torch.float64 if not result.is_complex() else torch.complex128
    values = torch.rand(result.shape, generator=generator, dtype=kind).to(result)
    return layout(values, 0) if can_tell(values) else values


def with_out(results: Sequence[Tensor], target: Layout) -> Form:
    """The form that writes into tensors laid out by `target`."""

    def form(sample: Sample, layout: Layout) -> Prepared:
        args, kwargs, laid = arrange(sample, layout, grad=False)
        empty = [torch.zeros_like(result) for result in results]
        outs = [target(out, 0) if can_tell(out) else out for out in empty]
        kwargs = {**kwargs, "out": outs[0] if len(outs) == 1 else tuple(outs)}

        def call() -> list[Tensor]:
            sample.call(*args, **kwargs)
            return outs

        return Prepared(call, laid)

    return form


def probe(name: str, sample: Sample, enter: Enter = enter_all) -> Iterator[Case]:
    """Yield a case for every aspect that this sample can show; none where it fails in NCHW."""
    try:
        enter(f"{sample.dims}-D NCHW")
        plain = _results(forward(sample, contiguous), seed=0)
    except Exception:
        return
    judge = _Judge(name, sample, enter)
    yield from judge("forward", forward, channels_last)
    if sample.differentiable:
        yield from judge("backward", backward, channels_last)
    if sample.inplace is not None:
        yield from judge("in-place", in_place, channels_last)
    if sample.takes_out and plain:
        # What is right to write does not depend on where: the reference writes to contiguous.
        right = with_out(plain, contiguous)
        yield from judge("out", with_out(plain, channels_last), channels_last, right)
        yield from judge("out", right, channels_last, right, Format.CONTIGUOUS)
    if sum(map(can_tell, sample.tensors)) > 1:
        yield from judge("mixed", forward, first_alone)
        yield from judge("mixed", forward, all_but_first)
    yield from judge("slice", forward, first_sliced)


def _results(prepared: Prepared, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    with torch.no_grad():
        results = prepared.call()
    if any(result.is_cuda for result in results):
        torch.cuda.synchronize()  # An error of the device shows at the next wait, wherever it is.
    return results


def _is_random(sample: Sample) -> bool:
    if draws_random_numbers(forward(sample, contiguous).call):
        return True
    # A custom operator need not carry torch's tag.
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

    def __call__(
        self,
        aspect: str,
        form: Form,
        layout: Layout,
        right: Form | None = None,
        wanted: Format | None = None,
    ) -> Iterator[Case]:
        setting = _SETTINGS.get((aspect, layout), "")
        if wanted:
            setting = "out is contiguous, the input channels last"
        try:
            self.enter(f"{self.sample.dims}-D {aspect} NCHW {setting}")
            expected = _results((right or form)(self.sample, contiguous), seed=0)
        except Exception:
            return
        try:
            self.enter(f"{self.sample.dims}-D {aspect} NHWC {setting}")
            outcome, words = self._compare(form, layout, expected, wanted)
        except Exception as error:
            outcome, words = Outcome.ERROR, f"{type(error).__name__}: {_first_line(error)}"
        known = outcome in (Outcome.KEEPS, Outcome.VIEW, Outcome.NONE)
        parts = [] if known else [describe(self.sample), setting, words]
        yield Case(self.sample.dims, aspect, outcome, "; ".join(filter(None, parts)))

    def _compare(
        self, form: Form, layout: Layout, expected: list[Tensor], wanted: Format | None
    ) -> tuple[Outcome, str]:
        prepared = form(self.sample, layout)
        given = {_memory(tensor) for tensor in prepared.laid}
        results = _results(prepared, seed=0)
        wrong = self._wrong(expected, results)
        if wrong:
            return Outcome.WRONG, wrong
        outcome, words = self._format(results, given, wanted)
        copy = self._extra_copy(form, layout)
        if outcome is Outcome.LOSES:
            culprit = first_loser(form(self.sample, layout).call)
            words = f"{culprit or 'it'} returns {words}"
        elif copy and outcome is not Outcome.VIEW:
            outcome = Outcome.CONVERTS
        if copy:
            words = "; ".join(filter(None, (words, f"inside, {copy}")))
        return outcome, words

    def _wrong(self, expected: list[Tensor], results: list[Tensor]) -> str:
        """How the numbers differ, unless they are of a kind that may."""
        if not difference_of(expected, results, ties=False):
            return ""
        if self.name in UNINITIALIZED or _is_random(self.sample):
            return ""
        return difference_of(expected, results, ties=_has_ties(self.sample))

    def _extra_copy(self, form: Form, layout: Layout) -> LayoutCopy | None:
        """The first copy between layouts of a whole tensor, if NCHW does with fewer of them."""
        prepared = form(self.sample, layout)
        half = min((tensor.numel() for tensor in prepared.laid), default=2) // 2
        copies = _copied(prepared, half)
        if copies and len(copies) > len(_copied(form(self.sample, contiguous), half)):
            return copies[0]
        return None

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
            elif _memory(result) in given or _is_broadcast(result):
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


def _copied(prepared: Prepared, at_least: int) -> tuple[LayoutCopy, ...]:
    with torch.no_grad():
        return layout_copies(prepared.call, at_least)


def _memory(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return 0  # A gradient that is zero throughout may have no memory at all.


def _is_broadcast(tensor: Tensor) -> bool:
    return any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "")[:130]
