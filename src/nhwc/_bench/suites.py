"""The published figures, and the cases that reproduce them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InputError
from ..machine.bfloat16 import emulates_bfloat16
from ..machine.environment import available_cores
from .engines import find_engine
from .paired import Task
from .results import Case, Published

TUTORIAL = "PyTorch tutorial 'Channels Last Memory Format in PyTorch'"
BLOG = "PyTorch blog 'Accelerating PyTorch Vision Models with Channels Last on CPU'"
FX_TUTORIAL = "PyTorch tutorial 'Building a Convolution/Batch Norm fuser in FX'"
APEX = f"{TUTORIAL}, apex main_amp.py -a resnet50 --b 200 --opt-level O2"

_VGG = ("vgg11", "vgg11_bn", "vgg13", "vgg13_bn", "vgg16", "vgg16_bn", "vgg19", "vgg19_bn")
_RESNET = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "resnext50_32x4d")
_WIDE = ("wide_resnet50_2", "wide_resnet101_2")

_VOLTA = (
    "alexnet",
    *("mnasnet0_5", "mnasnet0_75", "mnasnet1_0", "mnasnet1_3", "mobilenet_v2"),
    *_RESNET,
    *("shufflenet_v2_x0_5", "shufflenet_v2_x1_0", "shufflenet_v2_x1_5", "shufflenet_v2_x2_0"),
    *("squeezenet1_0", "squeezenet1_1"),
    *_VGG,
    *_WIDE,
)
_ICELAKE = (
    "alexnet",
    *("densenet121", "densenet161", "densenet169", "googlenet", "inception_v3"),
    *("mnasnet0_5", "mnasnet1_0"),
    *_RESNET,
    "resnext101_32x8d",
    *("shufflenet_v2_x0_5", "shufflenet_v2_x1_0"),
    *("squeezenet1_0", "squeezenet1_1"),
    *_VGG,
    *_WIDE,
)


@dataclass(frozen=True)
class Suite:
    """Models with one published claim about them all; the sources give ranges, no single figures.

    `per_core`, where set, makes the batch that many images per core of the machine. The claim does
    not hold for `controls`: what it is about is missing in them. `also` are variants that the
    source shows beside those of the claim.
    """

    name: str
    about: str
    models: tuple[str, ...]
    published: Published
    batch: int = 1
    per_core: int = 0
    train: bool = False
    amp: bool = False
    controls: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    @property
    def variants(self) -> tuple[str, ...]:
        """What the source compares."""
        return (self.published.before, self.published.after, *self.also)

    def chosen_models(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return the models of the suite that are named, or all."""
        everything = (*self.models, *self.controls)
        for name in names:
            if name not in everything:
                near = difflib.get_close_matches(name, everything, n=3)
                hint = f"Did you mean {', '.join(near)}?" if near else f"Try {everything[0]}."
                raise InputError(f"the suite {self.name} has no model {name!r}. {hint}")
        return tuple(dict.fromkeys(names)) or everything

    def precision(self, amp: bool | None, device: str) -> bool:
        """Whether to measure in mixed precision: as asked, or as published where that means much.

        A processor that emulates bfloat16 would time the emulation, which takes ten times as long.
        """
        if amp is None:
            return self.amp and not (device == "cpu" and emulates_bfloat16())
        for variant in self.variants if amp else ():
            engine = find_engine(variant)
            if not engine.autocasts:
                raise InputError(
                    f"--amp has no meaning beside --suite {self.name}: {engine.label}, which is "
                    "part of it, does not follow torch.autocast. Leave --amp out."
                )
        return amp

    def title(self, amp: bool) -> str:
        """Name and claim, and the precision where it is not the published one."""
        words = ("in float32", "in mixed precision")[amp]
        return f"{self.name}: {self.about}" + f"; measured {words}" * (amp is not self.amp)

    def tasks(
        self,
        variants: Sequence[str],
        *,
        models: Sequence[str] = (),
        batches: Sequence[int] = (),
        threads: Sequence[int] = (),
        amp: bool | None = None,
        device: str = "cpu",
        seed: int = 0,
    ) -> list[Task]:
        """Return every model at every batch and thread count, with the claim's variants added."""
        chosen = tuple(dict.fromkeys((*self.variants, *variants)))
        own = (self.per_core * available_cores() if self.per_core else self.batch,)
        mixed = self.precision(amp, device)
        return [
            Task(
                Case(model, ((batch, 3, side, side),), count, self.train, mixed, device, seed),
                chosen,
                None if model in self.controls else self.published,
            )
            for count in threads or (available_cores(),)
            for batch in batches or own
            for model in self.chosen_models(models)
            for side in (299 if model == "inception_v3" else 224,)
        ]


def _layout(low: float, high: float, where: str) -> Published:
    return Published(low, high, "eager", "channels_last", where)


SUITES = (
    Suite(
        "volta",
        "channels last gains 8-35 % (Volta GPU, mixed precision)",
        _VOLTA,
        _layout(1.08, 1.35, TUTORIAL),
        amp=True,
    ),
    Suite(
        "icelake",
        "channels last gains 26-76 % (Xeon Platinum 8380)",
        _ICELAKE,
        _layout(1.26, 1.76, TUTORIAL),
    ),
    Suite(
        "blog",
        "channels last gains 1.3-1.8x (Ice Lake, two images per core, one instance)",
        _ICELAKE,
        _layout(1.3, 1.8, BLOG),
        per_core=2,
    ),
    Suite(
        "fusion",
        "folding batch norm makes ResNet-18 faster, jit.script too (no figures given)",
        ("resnet18",),
        Published(None, None, "eager", "fused_nchw", FX_TUTORIAL),
        batch=10,
        controls=("vgg11",),
        also=("fused_script", "channels_last", "fused"),
    ),
    Suite(
        "apex",
        "channels last trains ResNet-50 22 % faster (V100, mixed precision, batch 200)",
        ("resnet50",),
        Published(1.22, 1.22, "eager", "channels_last", APEX),
        batch=8,
        train=True,
        amp=True,
    ),
)
"""The published claims; `--batch 200 --device cuda` makes `apex` the original comparison."""
