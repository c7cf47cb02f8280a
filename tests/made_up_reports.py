"""An audit and an optimization that never ran: all that golden texts and pages are made from."""

from __future__ import annotations

from nhwc import Format
from nhwc._audit import Audit
from nhwc._audit.divergence import Agreement
from nhwc._audit.findings import Finding
from nhwc._optimize.report import (
    Fallback,
    KernelTime,
    LayerReport,
    OptimizeReport,
    PlanReport,
    WholeTime,
)
from nhwc.graph.report import Opaque, PassReport, Site
from nhwc.machine.others import Others
from nhwc.machine.timing import Comparison, Samples
from nhwc.verify import Verification
from nhwc.verify.comparing import Check
from nhwc.watch.calls import Call, Copy, TensorSpec
from nhwc.watch.calls import CallSite as Place
from nhwc.watch.effects import CallEffect, Effect

from .made_up import HERE

LAST, PLAIN = Format.CHANNELS_LAST, Format.CONTIGUOUS
_STRIDES = {LAST: (256, 1, 32, 8), PLAIN: (256, 32, 8, 1)}


def _image(format: Format, source: int | None) -> TensorSpec:
    return TensorSpec((2, 8, 4, 8), _STRIDES[format], "float32", format, 2048, source)


def _call(index: int, operator: str, module: str, formats: tuple[Format, Format], **more) -> Call:
    place = Place(module, "Net", "/site-packages/zoo/net.py", 10 + index, f"x = {operator}(x)")
    given, made = formats
    return Call(index, f"torch.{operator}", False, place, (_image(given, index - 1),),
                (_image(made, index),), True, 1e-3 * (index + 1), **more)  # fmt: skip


def audited() -> Audit:
    """One call of four loses the format, and a later one pays."""
    copy = Copy((2, 8, 4, 8), _STRIDES[PLAIN], _STRIDES[LAST], 2048, 4e-4)
    calls = (
        _call(0, "conv2d", "stem", (LAST, LAST)),
        _call(1, "cat", "stage.1", (LAST, PLAIN)),
        _call(2, "conv2d", "stage.2", (PLAIN, LAST), copies=(copy,)),
        _call(3, "relu", "stage.2", (LAST, LAST)),
    )
    outcomes = (
        CallEffect(Effect.KEEPS),
        CallEffect(Effect.LOSES),
        CallEffect(Effect.RESTORES, 1),
        CallEffect(Effect.KEEPS),
    )
    remedy = "Keep that tensor in channels last where it is made; nhwc.optimize does it."
    lost = Finding("lost", "torch.cat", calls[1].site, (1,), (2,), 4e-4, 0.04, 2048, remedy)
    times = Comparison(Samples((0.012, 0.0121, 0.0119)), Samples((0.01, 0.0101, 0.0099)))
    unseen = ("reorders inside oneDNN's own kernels",)
    shapes = ((2, 3, 8, 16),)
    return Audit("net", shapes, calls, outcomes, (lost,), 0.01, True, unseen, HERE, times,
                 agreement=Agreement(3, None, None))  # fmt: skip


def optimized() -> OptimizeReport:
    """A plan of two layers, beside a part that could not be traced."""
    torchs = KernelTime("torch", "contiguous", 3e-3, 0.04, 2)
    ours = KernelTime("nhwc direct", "channels_last", 1e-3, 0.02, 7)
    layers = (
        LayerReport("stem", "conv2d 3x3 s2 p1 w8x3", ours, (ours, torchs), "settled"),
        LayerReport("head", "linear 8 w10", torchs, (torchs, ours), "open"),
    )
    left = (
        Fallback("linear", ("head",), 3e-3, 0.72, "torch's kernel was the fastest of 2"),
        Fallback("grid_sample", ("warp", "warp_1", "warp_2"), 1e-3, 0.24, "no kernel of ours"),
        Fallback("view", ("view",), 1e-6, 0.0, "no kernel of ours"),
    )
    folding = PassReport(
        "fold_bn_into_conv",
        (
            Site("bn1", "stem + bn1", True),
            Site("bn2", "cat + bn2", False, "its input comes from cat, not from a convolution"),
        ),
    )
    idle = PassReport("mend_pad")
    opaque = Opaque("neck", "Neck", "it branches on data (net.py:30)")
    checks = tuple(Check(i, "output", 2e-7, 3e-7, 9e-6) for i in range(3))
    before, slower = Samples((0.012, 0.0121, 0.0119)), Samples((0.024, 0.0242, 0.0239, 0.024))
    compared = {
        "graph": Comparison(slower, Samples((0.02, 0.0201, 0.0199, 0.02))),
        "plan": Comparison(before, Samples((0.004, 0.0041, 0.0039))),
    }
    plan = PlanReport(
        ("2x3x8x16 float32",), layers, 1, 3, renewed=1, layers_s=1e-3,
        wholes=(WholeTime(5e-3, 2, False), WholeTime(4e-3, 2, True)), fallbacks=left,
    )  # fmt: skip
    verified, sizes = Verification(checks), plan.inputs
    return OptimizeReport("net", sizes, False, "plan", "", (folding, idle), (opaque,), (plan,),
                          verified, compared, False, 1.5, HERE, Others(1.5, 2))  # fmt: skip
