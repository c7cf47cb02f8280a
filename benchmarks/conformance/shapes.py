"""Convolutions that others test: each kernel of ours that claims one, against float64.

The shapes of oneDNN's tests stand in `shapes.txt`; those of well-known networks are taken from the
networks. Every buffer lies against a page that must not be touched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tests.kernels import guarded
from tests.kernels.cases import Case as Convolution
from torch import nn

from nhwc.kernels.convolutions.conv import ConvKernel, conv2d_candidates
from nhwc.kernels.convolutions.spec import IMAGE, ConvSpec, Frames
from nhwc.kernels.layers.activations import Activation
from nhwc.models.vision import import_torchvision

from .judging import RIGHT, WRONG, Outcome

VERBS = ("kernels",)

LIST = Path(__file__).with_name("shapes.txt")

_NETWORKS = {
    "alexnet": 224,
    "densenet121": 224,
    "efficientnet_b0": 224,
    "googlenet": 224,
    "inception_v3": 299,
    "mobilenet_v2": 224,
    "mobilenet_v3_large": 224,
    "resnet18": 224,
    "resnet50": 224,
    "resnext50_32x4d": 224,
    "shufflenet_v2_x1_0": 224,
    "squeezenet1_1": 224,
    "vgg19": 224,
    "deeplabv3_resnet50": 224,
    "r3d_18": 112,
}
"""Networks of torchvision, and the size of the images or frames that they get."""


@dataclass(frozen=True)
class KernelCase:
    """One kernel on one shape, its buffers against the page behind them or the one before."""

    name: str
    spec: ConvSpec
    kernel: str
    at_end: bool


def groups() -> list[str]:
    return list(_shapes())


def cases(group: str) -> Iterator[KernelCase]:
    spec = _shapes()[group]
    for kernel in _candidates(spec):
        for at_end in (True, False):
            side = "end" if at_end else "beginning"
            yield KernelCase(f"{group} {kernel.name} {side}", spec, kernel.name, at_end)


def judge(case: KernelCase, verbs: Mapping[str, Any]) -> Iterator[Outcome]:
    """Run the kernel of this case; what reaches over its buffers ends the process."""
    kernel = next(one for one in _candidates(case.spec) if one.name == case.kernel)
    why = ""
    try:
        with torch.no_grad():
            guarded.run_kernel(kernel, Convolution(case.spec), case.at_end)
    except AssertionError as error:
        why = str(error)[:300]
    finally:
        guarded.maps.clear()
    for verb in verbs:
        yield Outcome(case.name, verb, WRONG if why else RIGHT, why)


def _candidates(spec: ConvSpec) -> list[ConvKernel]:
    return list(conv2d_candidates(spec.folded()))


@cache
def _shapes() -> dict[str, ConvSpec]:
    found = {line: read(line) for line in LIST.read_text().split("\n") if line[:1].isalpha()}
    seen = set(found.values())
    for network, size in _NETWORKS.items():
        for spec in _of_network(network, size):
            if spec not in seen:
                seen.add(spec)
                found[f"{network} {_text(spec)}"] = spec
    return found


def read(text: str) -> ConvSpec:
    """A shape as oneDNN's tests write it: a side d, h or w that is missing is as the last told.

    >>> read("ic3ih8oc17oh4kh3sh2ph1").out_h
    4
    """
    told = {key: int(number) for key, number in re.findall(r"([a-z]+)(\d+)", text)}
    known = [side for side in "dhw" if f"i{side}" in told]
    alone = known == ["w"]
    height, width = (_Side() if alone else _side(told, "h", known)), _side(told, "w", known)
    frames = IMAGE
    if "d" in known:
        depth = _side(told, "d", known)
        frames = Frames(
            depth.size, depth.taps, depth.stride, depth.padding, depth.dilation, depth.wanted
        )
    wanted = (height.out, width.out)
    spec = ConvSpec(
        n=told.get("mb", 2),
        c=told["ic"],
        h=height.size,
        w=width.size,
        k=told["oc"],
        r=height.taps,
        s=width.taps,
        stride=(height.stride, width.stride),
        padding=(height.padding, width.padding),
        dilation=(height.dilation, width.dilation),
        groups=told.get("g", 1),
        activation=Activation.RELU,
        frames=frames,
    )
    return spec if wanted == (spec.out_h, spec.out_w) else replace(spec, wanted=wanted)


@dataclass(frozen=True)
class _Side:
    """One side of an image or a volume, and how the filter moves along it."""

    size: int = 1
    taps: int = 1
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    told: int | None = None
    """How long the result's side is said to be."""

    @property
    def natural(self) -> int:
        seen = self.dilation * (self.taps - 1) + 1
        return (self.size + 2 * self.padding - seen) // self.stride + 1

    @property
    def out(self) -> int:
        return self.natural if self.told is None else self.told

    @property
    def wanted(self) -> int | None:
        return None if self.out == self.natural else self.out


def _side(told: dict[str, int], side: str, known: list[str]) -> _Side:
    own = side if side in known else known[-1]
    found = _Side(
        told[f"i{own}"],
        told.get(f"k{own}", 1),
        told.get(f"s{own}", 1),
        told.get(f"p{own}", 0),
        told.get(f"d{own}", 0) + 1,
        told.get(f"o{own}"),
    )
    if f"p{own}" in told or found.told is None:
        return found
    # Padding that is not told is what the result's size asks for.
    seen = found.dilation * (found.taps - 1) + 1
    return replace(found, padding=((found.told - 1) * found.stride + seen - found.size + 1) // 2)


def _of_network(name: str, size: int) -> list[ConvSpec]:
    """The convolutions of a network of torchvision, as they are called."""
    models = import_torchvision().models
    options: dict[str, Any] = {"weights_backbone": None} if "deeplab" in name else {}
    if name in ("googlenet", "inception_v3"):
        options["init_weights"] = False
    found: list[ConvSpec] = []

    def note(layer: nn.Module, given: tuple[torch.Tensor, ...], result: torch.Tensor) -> None:
        found.append(_spec(layer, given[0]))

    with torch.device("meta"):
        model = models.get_model(name, weights=None, **options).eval()
        for layer in model.modules():
            if isinstance(layer, (nn.Conv2d, nn.Conv3d)):
                layer.register_forward_hook(note)
        frames = (8,) if name == "r3d_18" else ()
        model(torch.empty(1, 3, *frames, size, size))
    return list(dict.fromkeys(found))


def _spec(layer: Any, x: torch.Tensor) -> ConvSpec:
    *deep, r, s = layer.kernel_size
    h, w = x.shape[-2:]
    frames = IMAGE
    if deep:
        frames = Frames(x.shape[2], deep[0], layer.stride[0], layer.padding[0], layer.dilation[0])
    return ConvSpec(
        n=x.shape[0],
        c=layer.in_channels,
        h=h,
        w=w,
        k=layer.out_channels,
        r=r,
        s=s,
        stride=layer.stride[-2:],
        padding=layer.padding[-2:],
        dilation=layer.dilation[-2:],
        groups=layer.groups,
        activation=Activation.RELU,
        frames=frames,
    )


def _text(spec: ConvSpec) -> str:
    deep = spec.frames
    volume = f"{deep.d}x" if deep != IMAGE else ""
    filters = f"{deep.t}x" if deep != IMAGE else ""
    groups = f" in {spec.groups} groups" if spec.groups > 1 else ""
    dilation = f" dilation {spec.dilation[0]}" if spec.dilation != (1, 1) else ""
    return (
        f"{spec.c}x{volume}{spec.h}x{spec.w} to {spec.k}, {filters}{spec.r}x{spec.s} "
        f"stride {spec.stride[0]} padding {spec.padding[0]}x{spec.padding[1]}{dilation}{groups}"
    )
