"""How long the cases of a suite will take, told before the first is measured.

One convolution, timed here, says how fast the machine computes; the rest is arithmetic. It is right
within a factor of two or so: enough to decide whether to wait.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from .engines import find_engine
from .paired import FEWEST, MOST, REST_S, Task, calls_in_a_turn
from .results import Case
from .step import autocast

GFLOP = {
    "alexnet": 1.4,
    "mnasnet0_5": 0.2,
    "mnasnet0_75": 0.4,
    "mnasnet1_0": 0.6,
    "mnasnet1_3": 1.1,
    "mobilenet_v2": 0.6,
    "resnet18": 3.6,
    "resnet34": 7.3,
    "resnet50": 8.2,
    "resnet101": 15.6,
    "resnet152": 23.0,
    "resnext50_32x4d": 8.5,
    "shufflenet_v2_x0_5": 0.1,
    "shufflenet_v2_x1_0": 0.3,
    "shufflenet_v2_x1_5": 0.6,
    "shufflenet_v2_x2_0": 1.2,
    "squeezenet1_0": 1.6,
    "squeezenet1_1": 0.7,
    "vgg11": 15.2,
    "vgg11_bn": 15.2,
    "vgg13": 22.6,
    "vgg13_bn": 22.6,
    "vgg16": 30.9,
    "vgg16_bn": 30.9,
    "vgg19": 39.3,
    "vgg19_bn": 39.3,
    "wide_resnet50_2": 22.8,
    "wide_resnet101_2": 45.5,
    "densenet121": 5.7,
    "densenet161": 15.5,
    "densenet169": 6.7,
    "googlenet": 3.0,
    "inception_v3": 11.4,
    "resnext101_32x8d": 32.8,
    "timm:mobilenetv3_small_100": 0.1,
    "timm:resnet50.a1_in1k": 8.2,
    "timm:vit_base_patch16_224": 35.1,
    "timm:efficientnet_b0": 0.8,
    "timm:convnext_tiny": 8.9,
    "timm:swin_tiny_patch4_window7_224": 9.0,
    "timm:vit_small_patch14_dinov2": 93.4,
    "timm:deit_tiny_patch16_224": 2.5,
    "timm:mobilenetv2_100": 0.6,
    "timm:convnextv2_nano": 4.9,
    "timm:mobilenetv4_conv_small": 0.4,
    "timm:tf_efficientnetv2_s": 10.6,
    "timm:regnety_016": 3.2,
    "timm:seresnext50_32x4d": 8.5,
    "timm:repvgg_a2": 11.4,
    "timm:mobilevit_s": 4.0,
    "timm:mobilevitv2_100": 3.6,
    "timm:efficientvit_b1": 1.0,
    "timm:efficientvit_m2": 0.4,
    "timm:levit_128": 0.8,
    "timm:fastvit_t8": 1.4,
    "timm:ghostnetv2_100": 0.3,
    "timm:edgenext_small": 2.5,
    "timm:repvit_m1_1": 2.7,
    "timm:poolformer_s12": 3.6,
    "timm:caformer_s18": 8.2,
    "timm:hgnetv2_b0": 0.6,
    "timm:maxvit_tiny_tf_224": 11.1,
    "timm:coatnet_0_rw_224": 8.8,
    "timm:tiny_vit_5m_224": 2.5,
    "timm:beit_base_patch16_224": 35.1,
    "timm:eva02_small_patch14_224": 12.2,
    "timm:mixer_b16_224": 25.2,
    "timm:pvt_v2_b0": 1.1,
    "timm:inception_next_tiny": 8.4,
    "timm:starnet_s1": 0.8,
    "timm:lcnet_100": 0.3,
    "timm:cspdarknet53": 13.1,
    "timm:dla34": 6.1,
    "timm:hrnet_w18": 8.6,
    "deeplabv3_mobilenet_v3_large": 4.9,
    "lraspp_mobilenet_v3_large": 1.0,
    "fcn_resnet50": 69.2,
    "ssdlite320_mobilenet_v3_large": 1.2,
    "r3d_18": 81.4,
    "mc3_18": 86.7,
    "r2plus1d_18": 81.0,
    "s3d": 36.0,
    "mvit_v2_s": 128.4,
    "swin3d_t": 87.8,
    "monai:UNet": 3.0,
    "monai:SegResNet": 36.3,
    "monai:DynUNet": 118.1,
    "monai:SwinUNETR": 50.8,
}
"""Operations on floats for one image or volume, in billions, as torch's own counter finds them."""

USUAL = 4.0
"""The same of a model that is in no suite."""

START_S = 4.0
"""Starting the processes of a case, and building the model in each of them."""

TRUTH_CALLS = 8
"""The float64 run and the audit, in calls of the model."""

SETUP_CALLS = 4
"""Calls of each variant before its turns."""

CALL_S = 0.005
"""What a call costs however little it computes: a hundred layers or two."""

STEP = 3.0
"""A training step, in forward passes."""

GPU_FLOPS = 2e13


def forecast(tasks: Sequence[Task], *, seconds: float) -> list[Task]:
    """Return the tasks, each with the seconds that it is expected to take."""
    settings = {_setting(task.case) for task in tasks}
    speeds = {setting: _speed(*setting) for setting in settings}
    return [
        dataclasses.replace(
            task, expected_s=_case_s(task, _call_s(task.case, speeds[_setting(task.case)]), seconds)
        )
        for task in tasks
    ]


def _setting(case: Case) -> tuple[int, bool, str]:
    return case.threads, case.amp, case.device


def _case_s(task: Task, call_s: float, seconds: float) -> float:
    setup_s = sum(
        find_engine(variant).typical_setup_s + SETUP_CALLS * call_s for variant in task.variants
    )
    round_s = len(task.variants) * ((calls_in_a_turn(call_s) + 1) * call_s + REST_S)
    rounds = max(FEWEST, min(MOST, int(seconds / round_s)))
    return START_S + TRUTH_CALLS * call_s + setup_s + rounds * round_s


def _call_s(case: Case, speed: float) -> float:
    """The seconds of one call, as eager torch would take."""
    passes = STEP if case.train else 1.0
    return passes * (CALL_S + case.batch * GFLOP.get(case.model, USUAL) * 1e9 / speed)


def _speed(threads: int, amp: bool, device: str) -> float:
    """Operations on floats in a second, of an ordinary convolution."""
    if device != "cpu":
        return GPU_FLOPS
    image, weight = torch.zeros(1, 64, 56, 56), torch.zeros(64, 64, 3, 3)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    taken_s: list[float] = []
    try:
        with torch.inference_mode(), autocast("cpu", amp):
            while len(taken_s) < 6 and sum(taken_s) < 0.5:
                start = time.perf_counter()
                F.conv2d(image, weight, padding=1)
                taken_s.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return 2.0 * 56 * 56 * weight.numel() / min(taken_s)
