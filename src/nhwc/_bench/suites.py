"""The published figures, and the cases that reproduce them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..machine.environment import available_cores
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

    `per_core`, where set, makes the batch that many images per core of the machine.
    """

    name: str
    about: str
    models: tuple[str, ...]
    published: Published
    batch: int = 1
    per_core: int = 0
    train: bool = False
    amp: bool = False

    def tasks(
        self,
        variants: Sequence[str],
        *,
        batches: Sequence[int] = (),
        threads: Sequence[int] = (),
        device: str = "cpu",
        seed: int = 0,
    ) -> list[Task]:
        """Return every model at every batch and thread count, with the claim's variants added."""
        claimed = (self.published.before, self.published.after)
        chosen = tuple(dict.fromkeys((*claimed, *variants)))
        own = (self.per_core * available_cores() if self.per_core else self.batch,)
        return [
            Task(
                Case(model, ((batch, 3, side, side),), count, self.train, self.amp, device, seed),
                chosen,
                self.published,
            )
            for count in threads or (available_cores(),)
            for batch in batches or own
            for model in self.models
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
        "folding batch norm makes ResNet-18 faster (no figure given)",
        ("resnet18",),
        Published(None, None, "eager", "fused", FX_TUTORIAL),
        batch=10,
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
