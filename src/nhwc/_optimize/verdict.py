"""Compare an optimized model with the original, and remember the verdict of the float64 run.

Running a model in float64 takes most of the time of an `optimize` whose kernels are known, and the
verdict is the same every time. So it is kept under a digest of the weights, the settings and what
the example is like. The digest cannot include the user's code, so every run also compares the
result with the original in float32, and on a picture of NaN, which must not become numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten

from ..errors import InputError, ModelFailed, VerificationError, advice_on, is_out_of_memory
from ..graph.effects.outside import Outside
from ..kernels.programs.pool import from_nothing
from ..machine.host_memory import raw, trim
from ..models.trees import has_strides
from ..optimized import Optimized, describe
from ..plan.ledger import Ledger
from ..shown import shown
from ..verify import Answers, Verification, answer, observe, verify
from ..verify.comparing import Check, lost_nans
from ..verify.inputs import TRIALS, holds_numbers, random_inputs, reordered_inputs, without_numbers
from ..verify.picking import decides
from .parts import verify_or_parts

_QUESTIONS = 5
"""Raised whenever more is asked of a result: what was remembered before says nothing of that."""

_OUTLIER = 16.0
"""Numbers so many times as large as others cost them digits in some kernels."""


class Judge:
    """Knows what a model answers, in float64 too unless it is remembered what that said."""

    def __init__(
        self, model: nn.Module, example: tuple[Any, ...], ledger: Ledger, say: Callable[[str], None]
    ) -> None:
        self.model, self.example, self.ledger, self.say = model, example, ledger, say
        self.digest = digest_of(model, example, TRIALS, _QUESTIONS)
        self._nans: dict[str, Any] | None = None
        self._run(wide=ledger.get(f"verified {self.digest}") is None)

    @property
    def in_full(self) -> bool:
        """Whether the model was run on all trial inputs, and in float64 if it can."""
        return len(self._truth.inputs) == TRIALS

    @property
    def answers(self) -> dict[str, Any]:
        """What the model answers to the example."""
        return self._truth.answers[0]

    def why_unlike(self) -> str | None:
        """Why a graph that is right may answer otherwise than the model; None if it may not."""
        if self._truth.drawn:
            return "it draws random numbers, which may fall on other elements where strides differ"
        if decides(self.model, self.example):
            return "it sorts, picks or rounds, and may decide otherwise where a last digit differs"
        return None

    def check_repeats(self) -> None:
        """Refuse a model of which two calls differ, where that is why the check failed."""
        outside = Outside(self.model)
        before, *_ = self._truth.answers
        once = Answers(self._truth.inputs[:1], (before,), None, self._truth.drawn)
        worst = verify(once, self.model).worst
        changed = outside.put_back()
        if changed:
            raise VerificationError(
                f"each call of {type(self.model).__name__} writes {changed}, which lies outside of "
                "the model, so that two calls may differ and no plan can be held against one. Keep "
                "it in an attribute of the model, which is put back after each run."
            )
        if worst is not None and not worst.passed:
            raise VerificationError(
                f"two calls of {type(self.model).__name__} on the same input differ in "
                f"{worst.output}, so that no plan can be held against one. It may return memory "
                "that nothing was written to, as torch.empty gives it, or ask for what changes by "
                "itself, as the time does. Make it from the inputs, or give it as one."
            )

    def runs(self, inputs: tuple[Any, ...]) -> None:
        """Refuse what the model itself cannot take, before anything is planned for it."""
        with _named(self.model, inputs):
            found = answer(self.model, inputs)
        _check_comparable(self.model, found)

    def check(self, graph: nn.Module) -> None:
        """Refuse a rewritten graph that is wrong before anything is built on it."""
        if not self.in_full and not verify(self._truth, graph).passed:
            # Float32 alone may judge too hard.
            self._run(wide=True)
        if self.in_full:
            found = verify_or_parts(self._truth, self.model, graph)
            if found.astray:
                # Its run in float64 would be as far off if each of its runs were.
                self.check_repeats()
            found.require()
        trim()

    def check_unfrozen(self, graph: nn.Module) -> None:
        """Check a graph of the model's own code as it was before it was frozen; then believe it.

        Torch multiplies matrices in another way if one wants gradients, and a model that sorts
        what it found may answer otherwise for a difference in the last digit.
        """
        frozen = [p for p in graph.parameters() if p.is_floating_point() or p.is_complex()]
        try:
            for parameter in frozen:
                parameter.requires_grad_(True)
            self.check(graph)
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
        self.model = graph
        self._run(wide=True)

    def judge(
        self,
        result: Optimized,
        graph: nn.Module,
        more: Sequence[tuple[Any, ...]],
        kernels: str,
        *,
        whole: bool,
    ) -> Verification:
        """The verdict on `result`, planned from `graph`, on the example and on `more` inputs.

        A `whole` graph has no code that may decide by values, and loop for ever on NaN.
        """
        if not self.in_full:
            known = recall(self.ledger, self.digest, kernels)
            if known is not None and self._verified(result, more, whole).passed:
                return known
            self._run(wide=True)
            self.check(graph)
        found = replace(self._verified(result, more, whole), constant=self._truth.constant)
        if found.passed:
            remember(self.ledger, self.digest, kernels, found)
        return found

    @from_nothing()
    def _verified(
        self, result: Optimized, more: Sequence[tuple[Any, ...]], whole: bool
    ) -> Verification:
        if self.in_full:
            checks = list(verify_or_parts(self._truth, self.model, result).checks)
        else:
            checks = list(verify(self._truth, result).checks)
        for inputs in more:
            truth = observe(self.model, [inputs], wide=self.in_full)
            checks += verify_or_parts(truth, self.model, result).checks
        if whole and not any(check.reason for check in checks):
            checks += self._lost_nans(result)
        return Verification(tuple(checks))

    def _lost_nans(self, result: Optimized) -> list[Check]:
        inputs = without_numbers(self.example)
        if self._nans is None:
            try:
                with _DiesOfNaN():
                    self._nans = answer(self.model, inputs)
            except Exception:
                # A user's forward may raise anything on a picture of NaN.
                self._nans = {}
        return list(lost_nans(self._nans, answer(result, inputs))) if self._nans else []

    def _run(self, *, wide: bool) -> None:
        self.say("running the original" + " in float64" * wide)
        inputs = random_inputs(self.example, TRIALS if wide else 1)
        try:
            self._truth: Answers = observe(self.model, inputs, wide=wide)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            with _named(self.model, self.example):
                taken = [self._taken(*each) for each in enumerate(inputs)]
                self._truth = observe(self.model, taken, wide=wide)
        _check_comparable(self.model, self.answers)
        trim()

    def _taken(self, number: int, drawn: tuple[Any, ...]) -> tuple[Any, ...]:
        """`drawn`, or else the example in another order, or as it is: the first that the model
        takes, which may check the range of its inputs."""
        for inputs in (drawn, reordered_inputs(self.example, number)):
            with contextlib.suppress(Exception):
                answer(self.model, inputs)
                return inputs
        return self.example


def _check_comparable(model: nn.Module, found: dict[str, Any]) -> None:
    """Refuse answers whose numbers cannot be held against those of another model."""
    for path, value in found.items():
        if not isinstance(value, Tensor) or not (value.is_nested or value.is_meta):
            continue
        what = "a nested tensor" if value.is_nested else "a tensor on the meta device"
        way = "Return its parts, as unbind() gives them" if value.is_nested else "Return real ones"
        raise InputError(
            f"{type(model).__name__} returns {what} as {path}, whose numbers cannot be compared "
            f"with those of an optimized model. {way}, or optimize the part of the model in front "
            "of it."
        )


@contextlib.contextmanager
def _named(model: nn.Module, inputs: tuple[Any, ...]) -> Iterator[None]:
    """Say on which inputs the model itself raised."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelFailed(
            f"{type(model).__name__} raised {type(error).__name__} on "
            f"{', '.join(describe(inputs))}: {shown(error).rstrip('.')}. "
            f"{advice_on(error, 'Check the example inputs.')}"
        ) from error


def digest_of(model: nn.Module, inputs: Sequence[Any], *rest: object) -> str:
    """The same for the same classes, settings and weights, and for inputs that are alike.

    >>> net, x = nn.Linear(2, 2), torch.ones(1, 2)
    >>> before = digest_of(net, [x])
    >>> digest_of(net, [x / 3]) == before
    True
    >>> _ = net.weight.data.mul_(2)
    >>> digest_of(net, [x]) == before
    False
    """
    found = hashlib.sha256(str(rest).encode())
    for path, part in model.named_modules(remove_duplicate=False):
        # What a model prints is for its author to say, and may fail.
        settings = sorted((name, value) for name, value in vars(part).items() if _is_plain(value))
        found.update(f"{path} {type(part)} {settings!r}".encode())
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        _add(found, name, value)
    leaves, structure = tree_flatten(list(inputs))
    found.update(str(structure).encode())
    for number, value in enumerate(leaves):
        if _is_as_drawn(value):
            found.update(f"{number} {value.dtype} {tuple(value.shape)} {value.stride()}".encode())
        else:
            _add(found, str(number), value)
    return found.hexdigest()[:32]


def _is_as_drawn(value: Any) -> bool:
    """Whether it says no more of a model than the numbers that are drawn in its place."""
    if not holds_numbers(value) or not value.numel():
        return False
    own = value.detach()
    own = own.float() if own.itemsize == 1 else own  # torch hardly computes with 8 bits
    usual = torch.linalg.vector_norm(own) / math.sqrt(own.numel())
    most = own.abs().max()
    return bool((usual > 1e-3) & (usual < 1e3) & (most < _OUTLIER * usual))


def _is_plain(value: Any) -> bool:
    """Whether it is a number, a text or None, or a tuple or list of such."""
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))
    return type(value) in (bool, int, float, complex, str, type(None), torch.dtype)


def recall(ledger: Ledger, digest: str, kernels: str) -> Verification | None:
    """The verdict on these kernels; None if there is none."""
    known = ledger.get(f"verified {digest}")
    try:
        if known["kernels"] != kernels:
            return None
        checks = tuple(map(_check_of, known["checks"]))
        if not checks:
            return None
        found = Verification(checks, remembered=True, constant=known["constant"] is True)
    except (TypeError, KeyError, ValueError):
        return None
    # Only what passed is kept.
    return found if found.passed else None


def _check_of(data: dict[str, Any]) -> Check:
    """The check that an entry of the ledger has; ValueError or TypeError if it is none."""
    kinds: dict[str, type] = {"input": int, "output": str, "reason": str, "in_float64": bool}
    kinds |= dict.fromkeys(("error", "eager_error", "allowed"), float)
    found = Check(**data)
    for name, kind in kinds.items():
        if type(getattr(found, name)) is not kind:
            raise ValueError(f"{name} is {getattr(found, name)!r}")
    return found


def remember(ledger: Ledger, digest: str, kernels: str, verdict: Verification) -> None:
    """Keep the verdict for whoever asks with the same digest and kernels."""
    kept = {name: verdict.to_dict()[name] for name in ("checks", "constant")}
    ledger.put(f"verified {digest}", {"kernels": kernels} | kept)


def _add(found: Any, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        found.update(f"{name} {value!r}".encode())
        return
    value = value.detach()
    shape = () if value.is_nested else tuple(value.shape)
    found.update(f"{name} {value.dtype} {shape}".encode())
    # Sparse, quantized and other devices' tensors have no plain bytes: digest their printed form.
    if not has_strides(value) or value.is_quantized or value.device.type != "cpu":
        found.update(repr(value).encode())
        return
    found.update(raw(value.resolve_conj().resolve_neg().contiguous()))


class _DiesOfNaN(TorchFunctionMode):
    """Raises where torch would end the process, as it does for the eigenvalues of NaN."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.linalg.eigvals:
            raise ArithmeticError("eigenvalues of NaN")
        return function(*args, **(kwargs or {}))
