"""Every claim of the sources, in our words, with the command that shows it and where to look."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .claims_evidence import (
    EXCEEDED,
    NOT_HERE,
    SHOWN,
    Look,
    audited,
    check,
    clean,
    faster,
    gpu,
    gpu_tests,
    inside,
    kept,
    level,
    losing,
    rule,
    said,
    stepwise,
    suite,
)

TUTORIAL = "Channels Last Memory Format in PyTorch (tutorial)"
BLOG = "Accelerating PyTorch Vision Models with Channels Last on CPU (blog)"
FUSER = "Building a Convolution/Batch Norm fuser in FX (tutorial)"

RULES = "nhwc ops --rules"
SHUFFLE = ("shufflenet_v2_x1_0", "--input", "2x3x64x64")
RESNET = ("resnet18", "--input", "2x3x64x64")


@dataclass(frozen=True)
class Claim:
    """One claim of a source."""

    source: str
    says: str
    command: str
    look: Look


def show(name: str) -> str:
    return f"python -m benchmarks.claims --show {name}"


def audit_of(arguments: tuple[str, ...]) -> str:
    return " ".join(("nhwc audit", *arguments))


def _reorders(reorders: dict[str, Any], format: str, *roles: str) -> list[dict[str, Any]]:
    primitives = reorders[format]["primitives"]
    return [p for p in primitives if p["kind"] == "reorder" and p["role"] in roles]


def _paths(reorders: list[dict[str, Any]]) -> str:
    return ", ".join(sorted({reorder["path"] for reorder in reorders}))


def _blocked(reorders: dict[str, Any]) -> tuple[bool, str]:
    found = _reorders(reorders, "contiguous", "input", "weight")
    return bool(found), f"{len(found)} reorders before convolutions: {_paths(found)}"


def _differ(reorders: dict[str, Any]) -> tuple[bool, str]:
    targets = {
        r["path"].partition(" -> ")[2] for r in _reorders(reorders, "contiguous", "input", "weight")
    }
    return len(targets) > 1, f"chosen here: {', '.join(sorted(targets))}"


def _back(reorders: dict[str, Any]) -> tuple[bool, str]:
    found = _reorders(reorders, "contiguous", "output")
    return bool(found), f"{len(found)} reorders after convolutions: {_paths(found)}"


def _saved(reorders: dict[str, Any]) -> tuple[bool, str]:
    before, after = (
        _reorders(reorders, format, "input", "output") for format in ("contiguous", "channels_last")
    )
    weights = _reorders(reorders, "channels_last", "weight")
    words = f"images: {len(before)} reorders in NCHW, {len(after)} in NHWC"
    return bool(before) and not after, f"{words}; weights: {len(weights)} in NHWC, too"


def _costs(reorders: dict[str, Any]) -> tuple[bool, str]:
    found = _reorders(reorders, "contiguous", "input", "output")
    return bool(found), (
        f"{len(found)} reorders of images, each with its time on the page; how much depends on the "
        "machine"
    )


def _only_convolutions(reorders: dict[str, Any]) -> tuple[bool, str]:
    kinds = {p["kind"] for p in reorders["channels_last"]["primitives"]} - {"reorder"}
    return kinds == {"convolution"}, f"oneDNN ran nothing but: {', '.join(sorted(kinds))}"


def _in_onednn(reorders: dict[str, Any]) -> tuple[bool, str]:
    found = [p for p in reorders["contiguous"]["primitives"] if p["kind"] == "convolution"]
    return bool(found), f"{len(found)} convolutions in oneDNN; torch keeps small ones for itself"


def _clean(report: dict[str, Any]) -> tuple[bool, str]:
    kept = report["counts"]["keeps"]
    return report["clean"], f"{kept} operators keep the format, none loses it"


def _lost(report: dict[str, Any]) -> tuple[bool, str]:
    lost = [f for f in report["findings"] if f["kind"] == "lost"]
    calls = sum(len(f["calls"]) for f in lost)
    return calls > 0, f"{calls} calls of {', '.join(f['operator'] for f in lost)}"


def _restored(report: dict[str, Any]) -> tuple[bool, str]:
    payers = [i for f in report["findings"] for i in f["payers"]]
    names = {report["calls"][i]["operator"].rpartition(".")[2] for i in payers}
    return names == {"conv2d"}, f"{len(payers)} convolutions restore it"


def _copied(report: dict[str, Any]) -> tuple[bool, str]:
    copied = sum(f["copied_bytes"] for f in report["findings"])
    return copied > 0, f"{copied / 1e6:.1f} MB copied in a run of two images of 64x64"


def _named(report: dict[str, Any]) -> tuple[bool, str]:
    places = [f"{f['operator']} at {f['place']}" for f in report["findings"]]
    return bool(places), "; ".join(places)


TO, SHAPE = ".to(channels_last) restrides", "... and keeps the shape"
BOTH = "C=1 is both", "H=W=1 is both"
NOT_RESTRIDED = (
    "C=1: .contiguous(channels_last) does not restride",
    "H=W=1: .contiguous(channels_last) does not restride",
)
RESTRIDED = "C=1: .to(channels_last) does", "H=W=1: .to(channels_last) does"
CONVS = (
    "conv2d: channels-last weight, contiguous input",
    "conv2d: contiguous weight, channels-last input",
    "conv2d: all contiguous",
)
VOLUMES = "5-D: .to(channels_last_3d)", "5-D: conv3d keeps", "5-D: batch_norm preserves"
APEX = "nhwc train DATA -a resnet50 -b 200 --workers 16 --amp"

_TUTORIAL: tuple[tuple[str, str, Look], ...] = (
    (
        "Channels last is another order in memory; the order of the dimensions stays NCHW.",
        RULES,
        rule(TO, SHAPE),
    ),
    ("The channel becomes the densest dimension: an image lies pixel by pixel.", RULES, rule(TO)),
    (
        "Drawn, the contiguous batch has one plane after the other, the other one pixel after "
        "the other.",
        RULES,
        rule("a 10x3x32x32 tensor is contiguous", TO),
    ),
    (
        "Strides express it, so models of eager mode, traced and scripted ones go on working.",
        RULES,
        rule("torch.jit.script keeps", "torch.jit.trace keeps"),
    ),
    ("A 10x3x16x16 batch has strides 768, 1, 48, 3.", show("strides"), check("strides")),
    ("It exists for 4-D tensors only.", RULES, rule(*VOLUMES, outcome=EXCEEDED)),
    (
        "A new 10x3x32x32 tensor has strides 3072, 1024, 32, 1.",
        RULES,
        rule("a 10x3x32x32 tensor is contiguous"),
    ),
    ("`.to` converts: strides 3072, 1, 96, 3, the same shape.", RULES, rule(TO, SHAPE)),
    ("`.to` converts back.", RULES, rule(".to(contiguous_format) goes back")),
    (
        "`.contiguous(memory_format=)` converts just so.",
        RULES,
        rule(".contiguous(channels_last) restrides"),
    ),
    (
        "`is_contiguous(memory_format=)` checks the format.",
        RULES,
        rule("is_contiguous(channels_last) says yes", "is_contiguous() says no"),
    ),
    (
        "With one channel, or one pixel, only `.to` gives strides that say channels last.",
        RULES,
        rule(*NOT_RESTRIDED, *RESTRIDED),
    ),
    ("Such a tensor is contiguous and channels last at once.", RULES, rule(*BOTH)),
    ("So `.contiguous` does nothing to it.", RULES, rule(*NOT_RESTRIDED)),
    (
        "And `.to` gives its dimensions of size 1 strides that mean something.",
        RULES,
        rule(*RESTRIDED),
    ),
    (
        "`permute` promises no such strides either; `.to` is the safe way.",
        show("permuted"),
        check("permuted"),
    ),
    ("A tensor of 1x1x1 cannot be marked at all.", RULES, rule("1x1x1 cannot be marked")),
    (
        "A tensor can be created in channels last.",
        RULES,
        rule("empty(memory_format=channels_last)"),
    ),
    ("`clone` keeps the format.", RULES, rule("clone preserves")),
    (
        "So do `to` and `float`.",
        RULES,
        rule("to(float64) preserves", "float() preserves", "half() preserves"),
    ),
    ("So does `cuda`.", "nhwc ops --rules --device cuda", gpu_tests),
    (
        "So do `empty_like` and its kind.",
        RULES,
        rule("empty_like preserves", "zeros_like preserves", "rand_like preserves"),
    ),
    (
        "So do pointwise operators.",
        RULES,
        rule("a pointwise operator preserves", "two operands, both channels last"),
    ),
    (
        "Convolution and batch norm support it through cuDNN.",
        "nhwc ops --device cuda",
        gpu_tests,
    ),
    ("In convolutions channels last wins unless all inputs are contiguous.", RULES, rule(*CONVS)),
    (
        "A half-precision convolution on the GPU, weights converted, returns channels last.",
        "nhwc ops --rules --device cuda",
        gpu_tests,
    ),
    (
        "An operator without support converts to contiguous inside, which costs, and the format "
        "goes no further.",
        audit_of(SHUFFLE),
        audited(_lost, *SHUFFLE),
    ),
    (
        "Its answer is right all the same.",
        RULES,
        rule("an operator without support is still right"),
    ),
    (
        "There are gains on CPUs (and on GPUs).",
        "nhwc bench --suite icelake",
        suite("icelake", SHOWN),
    ),
    (
        "The largest are on tensor cores in float16.",
        "nhwc bench --suite volta --device cuda",
        gpu("volta"),
    ),
    (
        "Training with mixed precision gains more than 22 %.",
        "nhwc bench --suite apex --device cuda",
        gpu("train", low=1.22, on_cpu="apex"),
    ),
    (
        "The published training script prints time, speed, loss and precision every ten batches.",
        "nhwc train --synthetic -a resnet50 --max-batches 20",
        said(SHOWN, "the same columns (tests/train/test_train_cli.py)"),
    ),
    ("On a V100 it trains 770 images/s in NCHW.", f"{APEX}", gpu()),
    ("And 1010 images/s with channels last.", f"{APEX} --channels-last", gpu()),
    (
        "28 models have full support.",
        "nhwc bench --suite volta",
        clean("volta", "volta", "icelake"),
    ),
    (
        "On Volta these gain 8-35 %.",
        "nhwc bench --suite volta --device cuda",
        gpu("volta", low=1.08, high=1.35),
    ),
    (
        "29 models have full support on CPUs.",
        "nhwc bench --suite icelake",
        clean("icelake", "icelake"),
    ),
    ("On an Ice Lake these gain 26-76 %.", "nhwc bench --suite icelake", suite("icelake")),
    (
        "Any model can be converted, and hands the format on once an input or a weight has it.",
        audit_of(RESNET),
        audited(_clean, *RESNET),
    ),
    (
        "A model is converted once, its inputs each time.",
        show("converted"),
        check("converted"),
    ),
    ("Not every operator supports it; those return contiguous tensors.", "nhwc ops", losing),
    ("Each stops the format there.", audit_of(SHUFFLE), audited(_lost, *SHUFFLE)),
    (
        "The next convolution, its weight converted, restores it.",
        audit_of(SHUFFLE),
        audited(_restored, *SHUFFLE),
    ),
    ("These conversions are overhead.", audit_of(SHUFFLE), audited(_copied, *SHUFFLE)),
    (
        "One may hold the operators of a model against the community's list.",
        audit_of(SHUFFLE),
        audited(_named, *SHUFFLE, outcome=EXCEEDED),
    ),
    (
        "Or wrap all operators so that one that loses the format raises.",
        show("raises"),
        check("raises"),
    ),
    (
        "Before it raises, or if the operator itself does, its inputs are printed.",
        show("inputs"),
        check("inputs"),
    ),
    (
        "To do: resolve the ambiguity of N1HW and NC11.",
        show("marked"),
        check("marked", EXCEEDED),
    ),
    (
        "To do: test distributed training.",
        "torchrun --nproc-per-node 2 -m nhwc train --synthetic -a resnet18 --max-batches 10 "
        "--channels-last",
        said(EXCEEDED, "two processes give the losses of one (tests/train/test_distributed.py)"),
    ),
    ("To do: more operators.", "nhwc ops", losing),
)

_BLOG: tuple[tuple[str, str, Look], ...] = (
    (
        "The memory format matters to the speed of vision models; channels last is the better one.",
        "nhwc bench --suite icelake",
        suite("icelake", SHOWN),
    ),
    (
        "The order in memory is one thing; sizes and strides are told as NCHW in either.",
        RULES,
        rule(TO, SHAPE),
    ),
    (
        "The default is channels first.",
        RULES,
        rule("a 10x3x32x32 tensor is contiguous"),
    ),
    (
        "An operator's output has the format of its input.",
        RULES,
        rule("a pointwise operator preserves", "batch_norm preserves", "conv2d: all contiguous"),
    ),
    ("Convolutions run in oneDNN.", audit_of(RESNET), inside(_in_onednn, *RESNET)),
    (
        "In NCHW their inputs and weights are first reordered into blocks.",
        audit_of(RESNET),
        inside(_blocked, *RESNET),
    ),
    (
        "Which blocks depends on shapes and processor.",
        audit_of(RESNET),
        inside(_differ, *RESNET),
    ),
    ("Their outputs are reordered back.", audit_of(RESNET), inside(_back, *RESNET)),
    (
        "These conversions eat up part of the gain.",
        audit_of(RESNET) + " -o page.html",
        inside(_costs, *RESNET),
    ),
    (
        "In NHWC oneDNN works on torch's memory; the conversions of input and output are saved "
        "(figure 2).",
        audit_of(RESNET) + " -o page.html",
        inside(_saved, *RESNET),
    ),
    (
        "An operator without support takes NHWC for strided NCHW and falls back.",
        audit_of(SHUFFLE),
        audited(_lost, *SHUFFLE),
    ),
    ("Activations have kernels, forward and backward.", "nhwc ops relu", kept("relu", "prelu")),
    (
        "Normalizations have.",
        "nhwc ops group_norm",
        kept("batch_norm", "group_norm"),
    ),
    (
        "Poolings have.",
        "nhwc ops max_pool2d",
        kept("max_pool2d", "adaptive_avg_pool2d"),
    ),
    (
        "Shuffles have.",
        "nhwc ops pixel_shuffle",
        kept("channel_shuffle", "pixel_shuffle"),
    ),
    (
        "All but convolutions are torch's own kernels.",
        audit_of(RESNET),
        inside(_only_convolutions, *RESNET),
    ),
    (
        "They split work among threads alike, vectorize over the channels for AVX2 and AVX-512, "
        "and NCHW was tuned as well.",
        "nhwc ops",
        said(NOT_HERE, "how a kernel is written does not show from outside, only its speed"),
    ),
    (
        "Two images per core, one instance: 1.3x to 1.8x.",
        "nhwc bench --suite blog",
        suite("blog"),
    ),
    (
        "Poolings and upsamplings gain, since only NHWC lets them vectorize.",
        "nhwc ops max_pool2d",
        faster("max_pool2d", "avg_pool2d", "interpolate"),
    ),
    (
        "Layers to which the format is nothing take the same time.",
        "nhwc ops relu",
        level("relu", "sigmoid", "silu", "hardswish", "add", "mul"),
    ),
    (
        "torch.fx and TorchScript go together with it.",
        show("script_and_fx"),
        check("script_and_fx"),
    ),
    ("It is for 2-D models so far.", RULES, rule(*VOLUMES, outcome=EXCEEDED)),
)

_FUSER: tuple[tuple[str, str, Look], ...] = (
    (
        "Pairs of convolution and batch norm are found by data flow, also in a Sequential and in a "
        "wrapper.",
        show("found"),
        check("found"),
    ),
    ("Tracing inlines both into one graph.", show("graph"), check("graph")),
    ("It is for inference only.", show("training"), check("training")),
    (
        "Folding needs no new operator: the statistics go into the weights.",
        show("baked"),
        check("baked"),
    ),
    ("The folded model gives the same answers.", show("same"), check("same")),
    (
        "A convolution whose output another node uses is left alone.",
        show("users"),
        check("users"),
    ),
    ("The graph is checked, and its code made anew.", show("linted"), check("linted")),
    ("The model that was given stays as it was.", show("untouched"), check("untouched")),
    ("No batch norm is left in the code.", show("gone"), check("gone")),
    (
        "For brevity it matches 2-D convolutions only.",
        show("ranks"),
        check("ranks", EXCEEDED),
    ),
    (
        "ResNet-18 gets faster.",
        "nhwc bench --suite fusion",
        stepwise("fusion", "fused_nchw", "eager"),
    ),
    (
        "The result can be scripted without trouble.",
        show("scripted"),
        check("scripted"),
    ),
    (
        "Scripting makes it faster still.",
        "nhwc bench --suite fusion",
        stepwise("fusion", "fused_script", "fused_nchw"),
    ),
)

CLAIMS = tuple(
    Claim(source, *row)
    for source, rows in ((TUTORIAL, _TUTORIAL), (BLOG, _BLOG), (FUSER, _FUSER))
    for row in rows
)
