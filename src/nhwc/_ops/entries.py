"""The inventory: torch's own databases of operators and modules, and the calls they offer.

They live in `torch.testing._internal`, ship with torch, and change without notice. An entry
that cannot be read is returned by name with the reason; none is left out silently.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from .own import OWN, Maker
from .samples import LARGE, SHAPES, Enter, Sample, enter_all, lift, spread_out

PER_DIMS = 3
"""Calls taken from torch's samples, for each number of dimensions."""

Problems = dict[str, str]

UNCHECKED_ARGUMENTS = (
    "native_batch_norm",
    "_native_batch_norm_legit",
    "_batch_norm_with_update",
    "_segment_reduce",
)
"""Operators that read past the end of tensors of the wrong size: never called with guesses."""

BY_STRIDES = ("as_strided", "as_strided_copy", "as_strided_scatter")
"""Operators that read memory by strides they are given: they have no format to keep."""


@dataclass(frozen=True)
class Entry:
    """One operator of the inventory: its name, and the function that makes torch's samples."""

    name: str
    variant: str
    group: str
    raw: Callable[[str, torch.dtype], list[Sample]]
    supports: Callable[[str, torch.dtype], bool]
    call: Callable[..., Any] | None = None

    @property
    def title(self) -> str:
        return f"{self.name} ({self.variant})" if self.variant else self.name

    def samples(
        self, device: str, dtype: torch.dtype, enter: Enter = enter_all
    ) -> Iterator[Sample]:
        """Yield calls whose first 4-D or 5-D tensor has one format: ours, torch's, lifted ones."""
        raw = [s for s in self.raw(device, dtype) if not s.converts_on_request]
        yield from (s for s in self.own(Maker(device, dtype)) if s.dims)
        for dims, shape in SHAPES.items():
            if dims == 4 and self.name.endswith("3d"):
                continue  # Four dimensions are one volume there, and the first is the channels.
            ready = [sample for sample in raw if sample.dims == dims and not _is_volume(sample)]
            yield from spread_out(ready, PER_DIMS)
            if len(ready) < 2 and self.name not in UNCHECKED_ARGUMENTS:
                yield from _lifted(spread_out(raw, 3 * PER_DIMS), shape, enter)

    def own(self, maker: Maker) -> list[Sample]:
        if self.call is None:
            return []
        found = []
        for name, variant, label, build in OWN:
            if (name, variant) == (self.name, self.variant):
                args, kwargs = build(maker)
                found.append(Sample(self.call, args, kwargs, label))
        return found

    def large(self, device: str, dtype: torch.dtype) -> Iterator[Sample]:
        """Yield calls of a realistic size: ours, or else torch's samples spread over more."""
        own = self.own(Maker(device, dtype, large=True))
        yield from own
        if not own and self.group != "nn module" and self.name not in UNCHECKED_ARGUMENTS:
            grown = (lift(s, LARGE, spread=True) for s in spread_out(self.raw(device, dtype), 4))
            yield from filter(None, grown)


def _is_volume(sample: Sample) -> bool:
    """Whether a padding of three dimensions makes a 4-D input one volume without a batch."""
    padding = next((a for a in sample.args[1:] if isinstance(a, tuple | list)), ())
    modes = {sample.kwargs.get("mode"), *(a for a in sample.args if isinstance(a, str))}
    return sample.dims == 4 and len(padding) == 6 and bool(modes & {"reflect", "replicate"})


def _lifted(raw: list[Sample], shape: tuple[int, ...], enter: Enter) -> Iterator[Sample]:
    found = 0
    for sample in raw:
        for spread in (True, False):
            lifted = lift(sample, shape, spread=spread)
            step = f"{len(shape)}-D lift {'spread' if spread else 'stacked'}"
            if lifted is not None and lifted.dims == len(shape) and _runs(lifted, step, enter):
                found += 1
                yield lifted
                break
        if found == PER_DIMS:
            return


def _runs(sample: Sample, step: str, enter: Enter) -> bool:
    """Whether a lifted call works; tried on the CPU, where a bad index does no lasting harm."""
    args, kwargs = tree_map_only(Tensor, lambda t: t.detach().cpu().clone(), _arguments(sample))
    try:
        enter(step)
        with torch.no_grad():
            sample.call(*args, **kwargs)
    except Exception:
        return False
    return True


def _arguments(sample: Sample) -> tuple[tuple, dict]:
    kwargs = {k: torch.device("cpu") if k == "device" else v for k, v in sample.kwargs.items()}
    return sample.args, kwargs


def inventory() -> tuple[dict[str, Entry], Problems]:
    """Return every entry by its title, and what could not be read."""
    problems: Problems = {}
    found = [*_operators(problems), *_modules(problems)]
    entries = {entry.title: entry for entry in found}
    known = {entry.name for entry in found}
    for name in dict.fromkeys(name for name, *_ in OWN if name not in known):
        call = _resolve(name)
        if call is None:
            problems[name] = "this torch has no operator of that name"
        else:
            entries[name] = Entry(name, "", "tensor", lambda *_: [], lambda *_: True, call)
    return entries, problems


def _operators(problems: Problems) -> Iterator[Entry]:
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except Exception as error:
        problems["torch.testing OpInfo database"] = f"cannot be imported: {error}"
        return
    for info in op_db:
        try:
            if info.name in BY_STRIDES:
                problems[info.name] = "reads memory by given strides: it has no format to keep"
            else:
                yield _operator(info)
        except Exception as error:
            problems[str(getattr(info, "name", info))] = f"cannot be read: {error!r}"


def _operator(info: Any) -> Entry:
    def raw(device: str, dtype: torch.dtype) -> list[Sample]:
        smooth = dtype.is_floating_point and info.supports_autograd
        found = info.sample_inputs(device, dtype, requires_grad=smooth)
        return [
            Sample(
                info.op,
                (sample.input, *sample.args),
                dict(sample.kwargs),
                inplace=info.inplace_variant,
                takes_out=bool(info.supports_out),
                differentiable=smooth,
            )
            for sample in itertools.islice(found, 400)
        ]

    def supports(device: str, dtype: torch.dtype) -> bool:
        return dtype in info.supported_dtypes(torch.device(device).type)

    return Entry(info.name, info.variant_test_name, _group(info), raw, supports, info.op)


def _group(info: Any) -> str:
    kind = type(info).__name__
    if kind in ("UnaryUfuncInfo", "BinaryUfuncInfo"):
        return "pointwise"
    if kind == "ReductionOpInfo" or info.name.startswith("masked."):
        return "reduction"
    if info.name.startswith("linalg.") or kind == "SpectralFuncInfo":
        return "linear algebra"
    return "nn function" if info.name.startswith("nn.functional.") else "tensor"


def _modules(problems: Problems) -> Iterator[Entry]:
    try:
        from torch.testing._internal.common_modules import module_db
    except Exception as error:
        problems["torch.testing ModuleInfo database"] = f"cannot be imported: {error}"
        return
    for info in module_db:
        try:
            name = str(info.name)
            if name.startswith("nn.Lazy"):
                problems[name] = "has no parameters before its first call; see the eager module"
                continue
            yield Entry(name, "", "nn module", _module_samples(info), _module_supports(info))
        except Exception as error:
            problems[str(getattr(info, "name", info))] = f"cannot be read: {error!r}"


def _module_supports(info: Any) -> Callable[[str, torch.dtype], bool]:
    return lambda device, dtype: dtype in info.dtypes


def _module_samples(info: Any) -> Callable[[str, torch.dtype], list[Sample]]:
    def raw(device: str, dtype: torch.dtype) -> list[Sample]:
        samples = []
        for training in (True, False):
            for given in info.module_inputs_func(info, device, dtype, True, training):
                made = given.constructor_input
                module = info.module_cls(*made.args, **made.kwargs).to(device, dtype)
                if given.forward_input is not None:
                    samples.append(_module_sample(module.train(training), given.forward_input))
        return samples

    return raw


def _module_sample(module: torch.nn.Module, given: Any) -> Sample:
    """Make a sample with parameters and buffers as arguments, so that they are laid out too."""
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def call(*args: Any, **kwargs: Any) -> Any:
        *inputs, state = args
        return torch.func.functional_call(module, state, tuple(inputs), kwargs)

    label = f"{module}, training" if module.training else str(module)
    words = label if "\n" not in label else ""
    return Sample(call, (*given.args, state), dict(given.kwargs), words)


def _resolve(name: str) -> Callable[..., Any] | None:
    target: Any = torch
    for part in name.split("."):
        target = getattr(target, part, None)
    return target if callable(target) else None
