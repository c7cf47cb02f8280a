"""The recipe of a run: every setting that is not data or model."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from numbers import Integral, Real

import torch

from ..errors import InputError
from ..models.kinds import true_or_false

OPTIMIZERS = ("sgd", "adamw")
PRECISIONS = ("float16", "bfloat16")


@dataclass(frozen=True)
class Recipe:
    """The settings of a training run.

    >>> Recipe(epochs=90, optimizer="adamw", lr=1e-3, amp=True, channels_last=True).amp
    True

    The learning rate climbs over `warmup_epochs` and falls along a cosine to zero. `accumulate`
    batches share one update; `ema` is the decay of a running average of the weights, which
    evaluation then uses.
    """

    epochs: int = 1
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 1e-4
    warmup_epochs: float = 0.0
    label_smoothing: float = 0.0
    accumulate: int = 1
    clip: float | None = None
    ema: float | None = None
    amp: bool = False
    amp_dtype: str | None = None
    channels_last: bool = False
    compile: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        true_or_false(amp=self.amp, channels_last=self.channels_last, compile=self.compile)
        whole(1, epochs=self.epochs, accumulate=self.accumulate)
        whole(0, seed=self.seed)
        at_least(0, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        at_least(0, warmup_epochs=self.warmup_epochs)
        finite(
            label_smoothing=self.label_smoothing,
            clip=1 if self.clip is None else self.clip,
            ema=0.5 if self.ema is None else self.ema,
        )
        if self.optimizer not in OPTIMIZERS:
            raise InputError(f"optimizer {self.optimizer!r} is not known. Use sgd or adamw.")
        if self.amp_dtype not in (None, *PRECISIONS):
            raise InputError(f"amp_dtype {self.amp_dtype!r} is not known. Use float16 or bfloat16.")
        if not 0 <= self.label_smoothing < 1:
            raise InputError(
                f"label_smoothing {self.label_smoothing} is out of range. Use 0 up to 1."
            )
        if self.clip is not None and not self.clip > 0:
            raise InputError(f"clip {self.clip} is no norm. Use a number above 0.")
        if self.ema is not None and not 0 < self.ema < 1:
            raise InputError(f"ema {self.ema} is no decay. Use a number between 0 and 1, as 0.999.")

    def autocast_dtype(self, device: torch.device) -> torch.dtype | None:
        """The type to compute in on `device`, or None for plain float32."""
        if not self.amp:
            return None
        name = self.amp_dtype or ("float16" if device.type == "cuda" else "bfloat16")
        if name == "float16" and device.type == "cpu":
            raise InputError("float16 does not train on the CPU. Use bfloat16, the default there.")
        return torch.float16 if name == "float16" else torch.bfloat16

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def at_least(low: int, **values: float) -> None:
    """Refuse the first of `values` that is no number, or below `low`, by its name."""
    finite(**values)
    for name, value in values.items():
        if value < low:
            raise InputError(f"{name} {value} is too small. Use {low} or more.")


def finite(**values: float) -> None:
    """Refuse the first of `values` that is no finite number, by its name."""
    for name, value in values.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            raise InputError(f"{name} {value!r} is no finite number. Give one.")


def whole(low: int, **values: int) -> None:
    """Refuse the first of `values` that is no whole number from `low` up to 64 bits."""
    for name, value in values.items():
        if not isinstance(value, Integral) or value >= _MOST:
            raise InputError(f"{name} {value!r} is no whole number. Use {low} or more.")
    at_least(low, **values)


_MOST = 1 << 63
