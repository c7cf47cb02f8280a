"""ncnn: converted by pnnx, float32 throughout, with Winograd, packed layouts and the light mode.

It has no batches: images go one after another, each on all threads.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from ..truth import arrays_of
from .engine import Engine, Prepared


def convert(model: nn.Module, inputs: tuple[Tensor, ...], folder: Path) -> None:
    import pnnx

    image = tuple(x[:1].contiguous() for x in inputs)
    torch.jit.trace(model, image, strict=False, check_trace=False).save(str(folder / "model.pt"))
    shapes = [array.shape for array in arrays_of(model(*image))]
    (folder / "shapes.json").write_text(json.dumps(shapes))
    given = ",".join(f"[{','.join(map(str, x.shape))}]f32" for x in image)
    # pnnx.export is avoided: it runs the Python file that it writes, and hides failures.
    subprocess.run(
        [pnnx.EXEC_PATH, "model.pt", f"inputshape={given}", "fp16=0", "device=cpu"],
        cwd=folder,
        check=True,
    )


def prepare(folder: Path, inputs: tuple[Tensor, ...]) -> Prepared:
    import ncnn

    net = ncnn.Net()
    # ncnn's wiki on speed asks for light mode, packing, sgemm and Winograd, and for as many
    # threads as large cores. Half precision is on by default; it would change the result.
    net.opt.num_threads = torch.get_num_threads()
    net.opt.lightmode = True
    for name in ("fp16_packed", "fp16_storage", "fp16_arithmetic", "bf16_packed", "bf16_storage"):
        setattr(net.opt, f"use_{name}", False)
    for name in ("winograd_convolution", "sgemm_convolution", "packing_layout"):
        setattr(net.opt, f"use_{name}", True)
    graph = folder / "model.ncnn.param"
    if net.load_param(str(graph)) or net.load_model(str(folder / "model.ncnn.bin")):
        raise RuntimeError(f"ncnn cannot read what pnnx made{_unknown(graph)}")
    shapes = json.loads((folder / "shapes.json").read_text())
    # An ncnn.Mat only points at its array, so `arrays` must outlive `images`.
    arrays = [[x[index].numpy() for x in inputs] for index in range(len(inputs[0]))]
    images = [[ncnn.Mat(array) for array in image] for image in arrays]

    def one(image: list[Any]) -> list[numpy.ndarray]:
        with net.create_extractor() as extractor:
            for index, mat in enumerate(image):
                extractor.input(f"in{index}", mat)
            answers = [extractor.extract(f"out{index}") for index in range(len(shapes))]
        if any(status for status, _ in answers):
            raise RuntimeError("ncnn could not run the model")
        found = zip(answers, shapes, strict=True)
        return [numpy.array(mat).reshape(shape) for (_, mat), shape in found]

    def run() -> list[numpy.ndarray]:
        outputs = zip(*map(one, images), strict=True)
        return [numpy.concatenate(output) if len(images) > 1 else output[0] for output in outputs]

    return run, ()


def _unknown(graph: Path) -> str:
    """Name the operators that pnnx left untranslated, for the end of an error message."""
    kinds = (line.split()[0] for line in graph.read_text().splitlines()[2:] if line.strip())
    foreign = sorted({kind for kind in kinds if "." in kind or "::" in kind})
    return f": it has no {', '.join(foreign)}" if foreign else ""


ENGINE = Engine(
    "ncnn",
    "ncnn",
    prepare,
    convert,
    cuda=False,
    packages=("ncnn", "pnnx"),
    typical_setup_s=10.0,
)
