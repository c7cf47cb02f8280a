"""Write docs/performance.md from benchmarks/results: `python -m benchmarks.performance`.

Measures nothing. The commands that wrote those files stand in the page.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

from nhwc._bench import SUITES, Benchmark, Row, load_benchmark
from nhwc._bench.results import geometric_mean
from nhwc.machine.timing import Comparison
from nhwc.render.bench_words import environment, label, peers
from nhwc.shown import shown

from . import aa, curve, first_use, gpu_tables, neighbours, published

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "performance.md", ROOT / "README.md"
SUMMED = (
    ("the tutorials' models, every engine", "Every engine"),
    ("the same, batch 4", "Every engine, batch 4"),
    ("22 of them, one thread", "Every engine, one thread"),
    ("the same, a Zen 4", "Every engine, on a Zen 4"),
    ("the same, AVX2 alone", "Every engine, on AVX2"),
    ("the same, AVX-512 hidden", "Every engine, without AVX-512"),
    ("the same, AVX-512 hidden, batch 4", "Every engine, without AVX-512, batch 4"),
    (
        "the same, AVX-512 hidden, batch 4, a Zen 4",
        "Every engine, without AVX-512, batch 4, on a Zen 4",
    ),
    (
        "the same, AVX-512 hidden, batch 4, an Intel",
        "Every engine, without AVX-512, batch 4, on an Intel",
    ),
    ("the same, AVX-512 hidden, a Zen 4", "Every engine, without AVX-512, on a Zen 4"),
    ("one model of each family that people deploy", "What people deploy"),
    ("the same, batch 4", "What people deploy, batch 4"),
    ("sixteen of them, an Intel", "What people deploy, on an Intel"),
    ("six of them, batch 4, an Intel", "What people deploy, batch 4, on an Intel"),
    ("the same, AVX-512 hidden", "What people deploy, without AVX-512"),
    ("fourteen families beside them, an Intel", "Families beside that suite, on an Intel"),
    ("thirty-two families, a Zen 4", "More families, on a Zen 4"),
    (
        "YOLO, DETR, U-Net, SegFormer, a diffusion decoder, vision towers (one over eager)",
        "Models of other packages",
    ),
    ("video and medical volumes", "Volumes"),
    ("the same, AVX2 alone", "Volumes, on AVX2"),
    ("the same, AVX-512 hidden", "Volumes, without AVX-512"),
)
"""What the README says of other sections than those of the suite."""

BEGIN, END = "<!-- written by benchmarks.performance -->", "<!-- end -->"
SHOWN = ("resnet18", "resnet50", "mnasnet1_0", "shufflenet_v2_x1_0", "densenet121", "vgg16")

TARGETS = {"vgg": 1.5, "resnet18": 1.5, "resnet34": 1.5, "resnet50": 1.2}
TARGETS |= dict.fromkeys(("mobilenet", "mnasnet", "shufflenet"), 1.15)
TARGETS |= {"timm:vit": 1.05, "timm:swin_tiny": 1.15, "timm:levit": 1.3, "timm:ghostnet": 1.5}
TARGETS |= {"timm:mobilenetv4": 1.15, "r3d": 1.6, "mc3": 1.6, "r2plus1d": 1.3}
TARGETS |= dict.fromkeys(("monai:UNet", "monai:SegResNet", "monai:DynUNet"), 1.4)
TARGETS |= {"benchmarks/guests.py:yolo": 1.15, "benchmarks/guests.py:unet": 1.5}
TARGETS |= {"benchmarks/guests.py:segformer": 1.1, "benchmarks/guests.py:vae": 1.2}
_UNPUBLISHED = {name for suite in SUITES if not suite.published for name in suite.models}
TARGETS |= dict.fromkeys(_UNPUBLISHED - TARGETS.keys(), 1.0) | {"": 1.05}
"""The ratio aimed at, by the beginning of the model's name: the first that fits decides."""


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    suite = load_benchmark(RESULTS / "icelake.json")
    parts = [INTRODUCTION.format(environment=environment(suite))]
    for batch, rows in by_batch(suite).items():
        parts.append(f"## Batch {batch}\n\n{engines(suite, rows)}\n\n{claims(rows, batch)}")
    for title, words, file, render in SECTIONS:
        found = render(RESULTS / file) if (RESULTS / file).exists() else NOTHING
        parts.append(f"## {title}\n\n{words}\n\n{found}")
    PAGE.write_text("\n\n".join(parts) + "\n")
    print(f"wrote {PAGE}")
    before, _, rest = README.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n{summary(suite)}\n{END}{after}")
    print(f"wrote the results in {README}")


def summary(suite: Benchmark) -> str:
    """Some of the models, and all of them in one row for each section."""
    single = by_batch(suite)[1]
    shown = [row for row in single if row.case.model in SHOWN]
    files = {title: RESULTS / file for title, _, file, _ in SECTIONS}
    lines = [
        "| batch 1 unless it says more | the others | ahead on | mean | least | processor |",
        "|---" * 6 + "|",
    ]
    for batch, rows in by_batch(suite).items():
        what = f"the suite, batch {batch}" if batch > 1 else "the suite `icelake`"
        lines.append(_summed(what, f"Batch {batch}", suite, rows))
    all_of_them = [suite]
    for what, title in SUMMED:
        if files[title].exists():
            all_of_them.append(result := load_benchmark(files[title]))
            lines.append(_summed(what, title, result, result.rows))
    met: dict[str, dict[str, None]] = {}
    for one in all_of_them:
        for name, version in {"torch": one.environment.torch, **peers(one)}.items():
            met.setdefault(name, {})[version] = None
    names = ", ".join(f"{name} {' and '.join(versions)}" for name, versions in met.items())
    table = engines(suite, shown, last=False)
    return "\n".join([table, "", SUMMARY, "", *lines, "", f"With {names}."])


SUMMARY = """\
All of them: on how many of the models nhwc is ahead of every other engine, and the time of the best
other engine over nhwc's, in the geometric mean and at worst. Each row leads to its section, which
has every model and the command."""


def _summed(what: str, title: str, result: Benchmark, rows: Sequence[Row]) -> str:
    leads, here = leads_of(rows), result.environment
    place = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
    return (
        f"| [{what}](docs/performance.md#{place}) | {', '.join(peers(result))} "
        f"| {sum(lead >= 1 for lead in leads)} of {len(leads)} | {geometric_mean(leads):.2f} "
        f"| {min(leads):.2f} | {here.processor} {here.instruction_set}, {here.cores} cores |"
    )


def by_batch(suite: Benchmark) -> dict[int, list[Row]]:
    batches = sorted({row.case.batch for row in suite.rows})
    return {batch: [row for row in suite.rows if row.case.batch == batch] for batch in batches}


def leads_of(rows: Sequence[Row]) -> list[float]:
    return [found.ratio for row in rows if (found := ahead(row))]


INTRODUCTION = """\
# Performance

Written by `python -m benchmarks.performance` from the raw samples in
[benchmarks/results](../benchmarks/results). {environment}.

Every engine has a process of its own, two threads and float32; they take turns, one at work while
the others sleep. Columns are times as fast as eager NCHW. *Ahead* is the time of the best engine
that is not nhwc over that of `nhwc optimize`, with its 99 % interval; *aim* is what it should
become. Errors are the largest difference from a float64 run over that run's largest value.
One processor did it all unless a section names another; batch 4, but for the VGGs, with slightly
slower kernels than the rest. AlexNet, Inception, R(2+1)D and S3D were measured anew on it, with
kernels for filters of 5x5, 7x1 and the like, which the tables of other processors lack. `nhwc fuse`
is measured in channels last: what folding adds is its column over the one before, nothing at all
for a VGG without batch norm.

![The icelake suite](icelake.png)

```
nhwc bench --suite icelake --batch 1,4 --seconds 2 --resume -o benchmarks/results/icelake.json
nhwc bench benchmarks/results/icelake.json --plot docs/icelake.png
```"""

CURVE = """\
The last column stays level where the time grows in proportion to the pixels.

```
python benchmarks/curve.py -o benchmarks/results/curve.json
```"""

NEIGHBOURS = """\
Milliseconds of a call beside other programs that do nothing but compute, on the same two cores.
In `nhwc optimize` a thread that has done its share of a long layer takes pieces of the share of the
other, and does not wait for one that has no core ([kernels](kernels.md)).

```
python -m benchmarks.neighbours --seconds 3 -o benchmarks/results/neighbours.json
```"""

SLOWER = """\
The same on a processor that does half as many multiply-adds a second, with earlier kernels.

```
nhwc bench --suite icelake --batch 1,4 --seconds 2 --resume \\
    -o benchmarks/results/icelake-slower.json
```"""

THREAD = """\
One thread for each engine, batch 1.

```
nhwc bench --suite icelake --threads 1 --seconds 2 --resume \\
    -o benchmarks/results/icelake-1-thread.json
```"""

NARROW = """\
The same on the processor of the first table, with AVX-512 hidden from every engine.
`benchmarks.narrow` tells nhwc and torch what to use, and gives the others, which ask the processor,
an answer without it. zentorch optimizes nothing there. Sixteen models (ResNeXts, MNASNets,
ResNet-18 and -34, VGG-13, -16, -19 and -11, -13, -19 with batch norm, DenseNet-161, Wide
ResNet-101) were measured later than the others, when products cut their rows into even tiles: with
AVX2 that is 3 to 6 % of a product.

```
python -m benchmarks.narrow python benchmarks/engines.py --batch 1 --threads 2 --seconds 1 \\
    --variants eager,channels_last,optimized,onnxruntime,openvino,opencv,ncnn,mnn,executorch \\
    -o benchmarks/results/engines-narrow.json
```"""

NARROW_4 = """\
The same at batch 4, for the models that were raced so; the command goes on with the others.

```
python -m benchmarks.narrow python benchmarks/engines.py --batch 4 --threads 2 --seconds 1 \\
    --variants eager,channels_last,optimized,onnxruntime,openvino,opencv,ncnn,mnn,executorch \\
    -o benchmarks/results/engines-narrow-batch-4.json
```"""

NARROW_ZEN4 = """\
All of them on the Zen 4; zentorch raced the last twenty-four. Nothing else ran there, but the
host's memory was restless: the intervals say how much that blurs.

```
python -m benchmarks.narrow python benchmarks/engines.py --batch 1 --threads 2 --seconds 1 \\
    -o benchmarks/results/engines-zen4-narrow.json \\
    resnet18 resnet50 mobilenet_v2 mnasnet0_5 shufflenet_v2_x1_0 squeezenet1_1 googlenet \\
    densenet121 resnext50_32x4d vgg16 mnasnet1_0 mnasnet1_3 mnasnet0_75 shufflenet_v2_x0_5 \\
    shufflenet_v2_x1_5 shufflenet_v2_x2_0 squeezenet1_0 resnet34 resnet101 inception_v3 vgg11 \\
    alexnet densenet169 wide_resnet50_2 densenet161 vgg11_bn vgg13 resnext101_32x8d resnet152 \\
    vgg16_bn vgg13_bn vgg19 vgg19_bn wide_resnet101_2
```"""

NARROW_4_ZEN4 = """\
The same at batch 4, on the Zen 4, for models that the table above lacks; the command goes on with
the others.

```
python -m benchmarks.narrow python benchmarks/engines.py --batch 4 --threads 2 --seconds 1 \\
    --variants eager,channels_last,optimized,onnxruntime,openvino,opencv,ncnn,mnn,executorch \\
    -o benchmarks/results/engines-zen4-narrow-batch-4.json
```"""

NARROW_4_INTEL = """\
The same at batch 4, on the Intel of "Every engine", for the largest models, which both tables above
lack; ResNeXt-101 as in the table with AVX-512.

```
python -m benchmarks.narrow python benchmarks/engines.py --batch 4 --threads 2 --seconds 1 \\
    --variants eager,channels_last,optimized,onnxruntime,openvino,opencv,ncnn,mnn,executorch \\
    -o benchmarks/results/engines-intel-narrow-batch-4.json \\
    wide_resnet101_2 vgg19 vgg19_bn resnext101_32x8d
```"""

ENGINES = """\
Every engine that installs with pip and runs such models in float32, batch 1, models of both suites.
Each is set up as its makers advise (`_bench/engines`). ONNX Runtime's offline optimizer knows none
of these families. The host had other guests meanwhile: the intervals say how much that blurs.

```
pip install '.[engines,ncnn,mnn,opencv,executorch,zentorch]'
python benchmarks/engines.py --batch 1 --seconds 1 -o benchmarks/results/engines.json
```"""

ENGINES_1_THREAD = """\
The same with one thread for each engine, 22 of the models, on two other days. The host was
restless: the intervals are wide.

```
python benchmarks/engines.py MODEL --batch 1 --threads 1 --seconds 1 \\
    -o benchmarks/results/engines-1-thread.json
```"""

ENGINES_ZEN4 = """\
The same on a processor of another maker with AVX-512, whose second-level cache is half as large.

```
python benchmarks/engines.py --batch 1 --seconds 1 -o benchmarks/results/engines-zen4.json
```"""

ENGINES_AVX2 = """\
The same on a processor with AVX2 alone, where zentorch optimizes nothing. The host moved the two
cores apart and together meanwhile.

```
python benchmarks/engines.py --batch 1 --seconds 1 -o benchmarks/results/engines-avx2.json
```"""

ENGINES_BATCH_4 = """\
All models of the two suites at batch 4, on the processor of the table above. ResNeXt-101 was
measured anew when threads began to take pieces of one another's layers: it had been behind.

```
python benchmarks/engines.py --batch 4 --threads 2 --seconds 1 \\
    -o benchmarks/results/engines-batch-4.json
```"""

DEPLOY_INTEL = """\
Sixteen of the suite at batch 1, most of them of tokens: their attention has been timed with all its
settings since the tables above were made. The host had other guests: see the intervals. Three were
measured twice, in a sitting of their own: BEiT had come out at 0.98 and MobileNetV4 at 0.94 of the
best other engine, and EfficientViT's statistics had been drawn so that every answer was rounding.

```
nhwc bench timm:vit_base_patch16_224 timm:swin_tiny_patch4_window7_224 \\
    timm:vit_small_patch14_dinov2 timm:deit_tiny_patch16_224 timm:beit_base_patch16_224 \\
    timm:eva02_small_patch14_224 timm:mixer_b16_224 timm:mobilenetv4_conv_small \\
    timm:convnext_tiny timm:mobilevitv2_100 timm:poolformer_s12 timm:levit_128 \\
    timm:seresnext50_32x4d timm:pvt_v2_b0 timm:coatnet_0_rw_224 timm:efficientvit_b1 \\
    --suite deploy --batch 1 --threads 2 --seconds 1 --resume \\
    -o benchmarks/results/deploy-intel.json
```"""

DEPLOY_INTEL_BATCH_4 = """\
Six of the suite at batch 4. Swin was measured last, for 2 seconds, when masked windows had become
attention of one program.

```
nhwc bench timm:mobilenetv3_small_100 timm:resnet50.a1_in1k timm:vit_base_patch16_224 \\
    timm:efficientnet_b0 timm:convnext_tiny timm:swin_tiny_patch4_window7_224 \\
    --suite deploy --batch 4 --seconds 1 --resume -o benchmarks/results/deploy-intel-batch-4.json
```"""

FAMILIES = """\
Fourteen families that the suite has no model of, batch 1; each runs as one program. ConViT and CaiT
were measured last, when ConViT's softmax of positions was made with the plan.

```
nhwc bench timm:coat_tiny timm:davit_tiny timm:focalnet_tiny_srf timm:skresnet18 \\
    timm:nextvit_small timm:mvitv2_tiny timm:dm_nfnet_f0 timm:hiera_tiny_224 \\
    timm:twins_svt_small timm:xcit_nano_12_p8_224 timm:gcvit_xxtiny timm:convit_tiny \\
    timm:cait_xxs24_224 timm:mambaout_femto --batch 1 --threads 2 --seconds 1 \\
    --variants eager,channels_last,optimized,onnxruntime,openvino \\
    --resume -o benchmarks/results/families.json
```"""

FAMILIES_ZEN4 = """\
Thirty-two more, new ones and old; no kernel was made for them. MambaOut is in both tables. Each
runs as one program, but for CrossViT, whose image torch resizes. HaloNet with drawn weights is as
far from float64 in eager mode as in any engine.

```
nhwc bench timm:fasternet_t0 timm:rdnet_tiny timm:csatv2 timm:lowformer_b0 \\
    timm:cpubone_b0_bfrobust timm:iformer_t timm:efficientvim_m1 timm:shvit_s1 \\
    timm:swiftformer_xs timm:mambaout_femto timm:lcnetv2_base timm:sam2_hiera_tiny \\
    timm:crossvit_tiny_240 timm:res2next50 timm:resnest14d timm:rexnet_100 timm:jx_nest_tiny \\
    timm:pit_ti_224 timm:volo_d1_224 timm:tnt_s_legacy_patch16_224 timm:visformer_tiny \\
    timm:efficientformer_l1 timm:gmlp_ti16_224 timm:lambda_resnet26t timm:resmlp_12_224 \\
    timm:tf_mixnet_s timm:ese_vovnet19b_dw timm:xception41 timm:eca_nfnet_l0 \\
    timm:repghostnet_050 --batch 1 --threads 2 --seconds 1 \\
    --variants eager,channels_last,optimized,onnxruntime,openvino \\
    --resume -o benchmarks/results/families-zen4.json
nhwc bench timm:halonet_h1 timm:swinv2_tiny_window8_256 --input 1x3x256x256 --batch 1 \\
    --threads 2 --seconds 1 --variants eager,channels_last,optimized,onnxruntime,openvino \\
    --resume -o benchmarks/results/families-zen4.json
```"""

DEPLOY_NARROW = """\
The same suite with AVX-512 hidden from every engine, as above. Seven models were behind or nearly
so, and measured anew when products cut their rows into even tiles. Of EfficientViT-B1 no engine's
answer could be used, eager's own included: with the numbers that torch draws for AVX2, its last two
stages, whose attention divides by sums near zero, make roundings 300,000 times as large.

```
python -m benchmarks.narrow nhwc bench --suite deploy --threads 2 --seconds 1 --resume \\
    --variants eager,channels_last,optimized,onnxruntime,openvino \\
    -o benchmarks/results/deploy-narrow.json
```"""

VOLTA = """\
The models of the `volta` suite that `icelake` does not have, two threads.

```
nhwc bench mnasnet0_75 mnasnet1_3 mobilenet_v2 shufflenet_v2_x1_5 shufflenet_v2_x2_0 \\
    --batch 1,4 --seconds 2 -o benchmarks/results/volta.json
```"""

DEPLOY = """\
One model of each family that people deploy, detectors and segmentation among them. SSDlite has no
rival but eager: neither ONNX Runtime nor OpenVINO took it from this torchvision. *Of the peak* is
the share of this machine's arithmetic that `nhwc optimize` reaches, by the operations of the direct
sums: Winograd may pass 100 %.

```
nhwc bench --suite deploy --seconds 2 --resume -o benchmarks/results/deploy.json
```"""

DEPLOY_BATCH_4 = """\
The same suite at batch 4, on another processor.

```
nhwc bench --suite deploy --batch 4 --seconds 1 --resume -o benchmarks/results/deploy-batch-4.json
```"""

GUESTS = """\
Models of packages that nhwc does not depend on: Ultralytics' YOLO at 320 pixels, a U-Net of
segmentation-models-pytorch, transformers' SegFormer and DINOv2, its DETR and Deformable DETR, its
Mask2Former with a Swin, four blocks of Qwen2.5-VL's vision tower and all of SigLIP 2's for images
of any shape, both at one grid, and the decoder of Stable Diffusion's autoencoder for 256 pixels.
Detectors that sort their queries by score, as RT-DETR and D-FINE do, are not among them: random
weights make scores so alike that rounding decides the order, and no answer can be told right from
wrong. Neither engine converts Qwen2.5-VL's tower as it stands: its lead is over eager.

```
python -m benchmarks.guests -o benchmarks/results/guests.json
```"""

VOLUMES = """\
Video models of torchvision, and networks of MONAI where it is installed.

```
nhwc bench --suite volumes --batch 1,2 --seconds 1 --resume -o benchmarks/results/volumes.json
```"""

VOLUMES_AVX2 = """\
Some of them on a processor with AVX2 alone.

```
nhwc bench --suite volumes --batch 1 --seconds 1 --resume -o benchmarks/results/volumes-avx2.json
```"""

VOLUMES_NARROW = """\
All of them on the processor of the first of these tables, with AVX-512 hidden from every engine.

```
python -m benchmarks.narrow nhwc bench --suite volumes --batch 1 --seconds 1 --resume \\
    -o benchmarks/results/volumes-narrow.json
```"""

PEERS = """\
Those that compile for seconds to minutes, on some models, batch 1, all in one run.

```
python benchmarks/engines.py resnet18 resnet50 mobilenet_v2 vgg16 densenet121 alexnet \\
    squeezenet1_1 googlenet mnasnet1_0 shufflenet_v2_x1_0 resnext50_32x4d --batch 1 --seconds 3 \\
    --variants eager,optimized,jit,fx,compile_frozen -o benchmarks/results/peers.json
```"""

RULER = """\
The same variant twice, and one that a wrapper makes a tenth slower, each in two processes as
`nhwc bench` runs them.

```
python benchmarks/aa.py -o benchmarks/results/aa.json
```"""

FIRST_USE = """\
`optimize` on a machine that has seen nothing: kernels are compiled, layers are timed. What is found
is kept for the next process. The aims are 10 s for the first model, 3 s for the next, 1 s for what
is known. What is loaded is the saved model, in a process of its own, the second time.

```
python -m benchmarks.first_use
```"""

WHERE = """\
Layers as they were measured when the plan was made, alone and with warm caches.

```
python -m benchmarks.where resnet18 resnet50 mobilenet_v2 mnasnet0_75 mnasnet1_3 vgg11 \\
    > benchmarks/results/where.md
```"""


BLOG = """\
The suite of the blog on channels last on CPUs: two images per core, all cores in one process.

```
python -m benchmarks.published    # ten minutes at most; again, and it goes on
nhwc bench --suite blog           # the whole of it, with every engine
```"""

FUSION = """\
The three numbers of the tutorial on a fuser in FX, and the same folding in channels last. Each gain
is of one step: folded against unfolded in the same layout, scripted against folded. VGG11 has no
batch norm: it is the control, where folding gains nothing.

```
python -m benchmarks.published
nhwc bench --suite fusion
```"""

APEX = """\
A training step of ResNet-50 in NCHW and in channels last. The tutorial had a V100, mixed precision
and a batch of 200: `nhwc bench --suite apex --batch 200 --device cuda`. A processor that emulates
bfloat16 is measured in float32.

```
python -m benchmarks.published
nhwc bench --suite apex
```"""


GPU = """\
Everything that needs a GPU, in nine minutes, with nothing to install. Its files go into
benchmarks/results/gpu.

```
python -m benchmarks.gpu -o benchmarks/results/gpu
```"""


def _suite(path: Path) -> str:
    result = load_benchmark(path)
    tables = [f"{environment(result)}."]
    for batch, rows in by_batch(result).items():
        tables.append(f"Batch {batch}:\n\n{engines(result, rows)}")
    return "\n\n".join(tables)


def _published(path: Path) -> str:
    return published.table(load_benchmark(path))


def _curve(path: Path) -> str:
    return curve.table(load_benchmark(path))


def _neighbours(path: Path) -> str:
    content = json.loads(path.read_text())
    found = {busy: Benchmark.from_dict(one) for busy, one in content.items()}
    return f"{environment(found['0'])}.\n\n{neighbours.table(found)}"


def _first_use(path: Path) -> str:
    return first_use.table(json.loads(path.read_text()))


def _ruler(path: Path) -> str:
    return f"```\n{aa.summary(json.loads(path.read_text()))}\n```"


SECTIONS = (
    ("Every engine", ENGINES, "engines.json", _suite),
    ("Every engine, batch 4", ENGINES_BATCH_4, "engines-batch-4.json", _suite),
    ("Every engine, one thread", ENGINES_1_THREAD, "engines-1-thread.json", _suite),
    ("Every engine, on a Zen 4", ENGINES_ZEN4, "engines-zen4.json", _suite),
    ("Every engine, on AVX2", ENGINES_AVX2, "engines-avx2.json", _suite),
    ("Every engine, without AVX-512", NARROW, "engines-narrow.json", _suite),
    (
        "Every engine, without AVX-512, on a Zen 4",
        NARROW_ZEN4,
        "engines-zen4-narrow.json",
        _suite,
    ),
    ("Every engine, without AVX-512, batch 4", NARROW_4, "engines-narrow-batch-4.json", _suite),
    (
        "Every engine, without AVX-512, batch 4, on a Zen 4",
        NARROW_4_ZEN4,
        "engines-zen4-narrow-batch-4.json",
        _suite,
    ),
    (
        "Every engine, without AVX-512, batch 4, on an Intel",
        NARROW_4_INTEL,
        "engines-intel-narrow-batch-4.json",
        _suite,
    ),
    ("One thread", THREAD, "icelake-1-thread.json", _suite),
    ("The rest of volta", VOLTA, "volta.json", _suite),
    ("What people deploy", DEPLOY, "deploy.json", _suite),
    ("What people deploy, batch 4", DEPLOY_BATCH_4, "deploy-batch-4.json", _suite),
    ("What people deploy, on an Intel", DEPLOY_INTEL, "deploy-intel.json", _suite),
    (
        "What people deploy, batch 4, on an Intel",
        DEPLOY_INTEL_BATCH_4,
        "deploy-intel-batch-4.json",
        _suite,
    ),
    ("Families beside that suite, on an Intel", FAMILIES, "families.json", _suite),
    ("More families, on a Zen 4", FAMILIES_ZEN4, "families-zen4.json", _suite),
    ("What people deploy, without AVX-512", DEPLOY_NARROW, "deploy-narrow.json", _suite),
    ("Models of other packages", GUESTS, "guests.json", _suite),
    ("Volumes", VOLUMES, "volumes.json", _suite),
    ("Volumes, on AVX2", VOLUMES_AVX2, "volumes-avx2.json", _suite),
    ("Volumes, without AVX-512", VOLUMES_NARROW, "volumes-narrow.json", _suite),
    ("Another processor", SLOWER, "icelake-slower.json", _suite),
    ("The blog's suite", BLOG, "blog.json", _published),
    ("Folding alone", FUSION, "fusion.json", _published),
    ("A training step", APEX, "apex.json", _published),
    ("On a GPU", GPU, "gpu", gpu_tables.section),
    ("torch's own compilers", PEERS, "peers.json", _suite),
    ("Batch, image and threads", CURVE, "curve.json", _curve),
    ("Beside other programs", NEIGHBOURS, "neighbours.json", _neighbours),
    ("Is the ruler straight?", RULER, "aa.json", _ruler),
    ("The first use", FIRST_USE, "first-use.json", _first_use),
    ("Where the time goes", WHERE, "where.md", lambda path: path.read_text().strip()),
)
"""Further sections: title, words, file of results, renderer."""

NOTHING = "Nothing has been recorded yet."


def engines(suite: Benchmark, rows: list[Row], *, last: bool = True) -> str:
    """Every engine's speed on some rows; with `last`, the means and the counts below."""
    variants = [v for v in suite.variants if v != "eager"]
    floors = any(row.floor for row in rows)
    head = ["model", "eager ms", *map(label, variants), "ahead", "aim", "error"]
    head += ["floor ms", "of the peak"] * floors
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        eager, own, found = row.measurement("eager"), row.measurement("optimized"), ahead(row)
        cells = [_times(row.comparison(variant, "eager")) for variant in variants]
        fastest = max(cells, key=lambda cell: float(cell) if cell != "-" else 0.0)
        cells = [f"**{cell}**" if cell == fastest else cell for cell in cells]
        lead = (
            f"{found.ratio:.2f} ({found.interval[0]:.2f}-{found.interval[1]:.2f})" if found else "-"
        )
        lines.append(
            f"| {row.case.model} | {eager.median_s * 1e3:.1f} | {' | '.join(cells)} | {lead} "
            f"| {aim(row.case.model):.2f} | {own.error:.0e} |{_floor(row) * floors}"
            if eager and own
            else f"| {row.case.model} | {row.failure or 'not measured'} |"
        )
    if not last:
        return "\n".join(lines)
    found = [[row.comparison(variant, "eager") for row in rows] for variant in variants]
    means = [geometric_mean(c.ratio for c in column if c) for column in found]
    leads = leads_of(rows)
    reached = sum(c.ratio >= aim(row.case.model) for row in rows if (c := ahead(row)))
    mean = " | ".join(f"{m:.2f}" for m in means)
    lines.append(f"| geometric mean | | {mean} | {geometric_mean(leads):.2f} | | |")
    won = sum(lead >= 1 for lead in leads)
    lines += [
        "",
        f"Ahead of every other engine on {won} of {len(leads)} models; {reached} reach their aim; "
        f"at worst {min(leads):.2f}.",
    ]
    failures = _failures(rows)
    lines += ["", *failures] if failures else []
    return "\n".join(lines)


def _failures(rows: Sequence[Row]) -> list[str]:
    """Which engines have no time for which models, and why."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for one in row.measurements:
            if one.failure:
                why = f"{label(one.variant)}: {shown(one.failure)}"
                found.setdefault(why, []).append(row.case.model)
    return [f"- {why}: {', '.join(models)}" for why, models in found.items()]


def claims(rows: list[Row], batch: int) -> str:
    """List the published gain of plain channels last, and how each model compares with it here."""
    counted: dict[str, list[str]] = {}
    for row in rows:
        counted.setdefault(row.judgement, []).append(row.case.model)
    published = next(row.published for row in rows if row.published)
    lines = [
        f"Published for eager channels last: {published} ({published.where}). Here, batch {batch}:",
        "",
    ]
    lines += [f"- {what}: {', '.join(models)}" for what, models in sorted(counted.items()) if what]
    lost = [f"{row.case.model} ({row.propagation})" for row in rows if row.propagation != "clean"]
    lines.append(f"- format kept throughout, but for: {', '.join(lost) or 'none'}")
    return "\n".join(lines)


def ahead(row: Row) -> Comparison | None:
    peer = row.best(ours=False)
    return row.comparison("optimized", peer.variant) if peer else None


def aim(model: str) -> float:
    return next(ratio for start, ratio in TARGETS.items() if model.startswith(start))


def _floor(row: Row) -> str:
    share = row.share_of_peak("optimized")
    if row.floor is None or share is None:
        return " - | - |"
    return f" {row.floor.seconds * 1e3:.1f} | {share:.0%} |"


def _times(comparison: Comparison | None) -> str:
    return f"{comparison.ratio:.2f}" if comparison else "-"


if __name__ == "__main__":
    main()
