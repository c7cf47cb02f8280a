"""Suites: models to measure together, most with the published figures that they reproduce."""

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

# One of each family that people deploy, the most downloaded first.
_DEPLOY = (
    *("timm:mobilenetv3_small_100", "timm:resnet50.a1_in1k", "timm:vit_base_patch16_224"),
    *("timm:efficientnet_b0", "timm:convnext_tiny", "timm:swin_tiny_patch4_window7_224"),
    *("timm:vit_small_patch14_dinov2", "timm:deit_tiny_patch16_224", "timm:mobilenetv2_100"),
    *("timm:convnextv2_nano", "timm:mobilenetv4_conv_small", "timm:tf_efficientnetv2_s"),
    *("densenet121", "timm:regnety_016", "timm:seresnext50_32x4d", "timm:repvgg_a2"),
    *("timm:mobilevit_s", "timm:mobilevitv2_100", "timm:efficientvit_b1", "timm:efficientvit_m2"),
    *("timm:levit_128", "timm:fastvit_t8", "timm:ghostnetv2_100", "timm:edgenext_small"),
    *("timm:repvit_m1_1", "timm:poolformer_s12", "timm:caformer_s18", "timm:hgnetv2_b0"),
    *("timm:maxvit_tiny_tf_224", "timm:coatnet_0_rw_224", "timm:tiny_vit_5m_224"),
    *("timm:beit_base_patch16_224", "timm:eva02_small_patch14_224", "timm:mixer_b16_224"),
    *("timm:pvt_v2_b0", "timm:inception_next_tiny", "timm:starnet_s1", "timm:lcnet_100"),
    *("timm:cspdarknet53", "timm:dla34", "timm:hrnet_w18"),
    *("deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large", "fcn_resnet50"),
    "ssdlite320_mobilenet_v3_large",
)
_VOLUMES = (
    *("r3d_18", "mc3_18", "r2plus1d_18", "s3d", "mvit_v2_s", "swin3d_t"),
    *("monai:UNet", "monai:SegResNet", "monai:DynUNet", "monai:SwinUNETR"),
)

_IMAGE = (3, 224, 224)

_INPUTS = {
    "inception_v3": (3, 299, 299),
    "timm:vit_small_patch14_dinov2": (3, 518, 518),
    "timm:tf_efficientnetv2_s": (3, 300, 300),
    **dict.fromkeys(
        (
            *("timm:mobilevit_s", "timm:mobilevitv2_100", "timm:fastvit_t8"),
            *("timm:edgenext_small", "timm:cspdarknet53"),
            *("deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large", "fcn_resnet50"),
        ),
        (3, 256, 256),
    ),
    "ssdlite320_mobilenet_v3_large": (3, 320, 320),
    **dict.fromkeys(("r3d_18", "mc3_18", "r2plus1d_18"), (3, 16, 112, 112)),
    **dict.fromkeys(("s3d", "mvit_v2_s", "swin3d_t"), (3, 16, 224, 224)),
    **dict.fromkeys(
        ("monai:UNet", "monai:SegResNet", "monai:DynUNet", "monai:SwinUNETR"), (1, 64, 64, 64)
    ),
}
"""What a model takes, without the batch, where that is no image of 224 pixels."""


@dataclass(frozen=True)
class Suite:
    """Models to measure together, and what was published about them all, if anything was.

    The sources give ranges, no single figures. `per_core`, where set, makes the batch that many
    images per core of the machine. The claim does not hold for `controls`: what it is about is
    missing in them. `also` are variants that the source shows beside those of the claim.
    """

    name: str
    about: str
    models: tuple[str, ...]
    published: Published | None = None
    batches: tuple[int, ...] = (1,)
    per_core: int = 0
    train: bool = False
    amp: bool = False
    controls: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    @property
    def variants(self) -> tuple[str, ...]:
        """What the source compares; eager, where there is none."""
        claim = self.published
        return (claim.before, claim.after, *self.also) if claim else ("eager", *self.also)

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
        own = (self.per_core * available_cores(),) if self.per_core else self.batches
        mixed = self.precision(amp, device)
        return [
            Task(
                Case(model, ((batch, *shape),), count, self.train, mixed, device, seed),
                chosen,
                None if model in self.controls else self.published,
            )
            for count in threads or (available_cores(),)
            for batch in batches or own
            for model in self.chosen_models(models)
            for shape in (_INPUTS.get(model, _IMAGE),)
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
        batches=(10,),
        controls=("vgg11",),
        also=("fused_script", "channels_last", "fused"),
    ),
    Suite(
        "apex",
        "channels last trains ResNet-50 22 % faster (V100, mixed precision, batch 200)",
        ("resnet50",),
        Published(1.22, 1.22, "eager", "channels_last", APEX),
        batches=(8,),
        train=True,
        amp=True,
    ),
    Suite(
        "deploy",
        "what people deploy: one model of each family, detectors and segmentation among them",
        _DEPLOY,
        batches=(1, 4),
    ),
    Suite(
        "volumes",
        "video and medical volumes (MONAI's need pip install monai)",
        _VOLUMES,
        batches=(1, 2),
    ),
)
"""`--batch 200 --device cuda` makes `apex` the original comparison."""
