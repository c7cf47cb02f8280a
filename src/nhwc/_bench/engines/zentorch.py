"""zentorch: AMD's backend of `torch.compile`, for EPYC processors with AVX-512."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from ...formats import convert_
from .channels_last import to_channels_last
from .engine import Engine, Prepared


def prepare(model: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
    import torch._inductor.config as inductor

    # AMD's guide sets this for convolutional models in float32. zentorch reads it on import.
    os.environ["ZENDNNL_MATMUL_ALGO"] = "1"
    import zentorch

    if not zentorch._C.is_avx512_supported():
        raise RuntimeError("zentorch optimizes nothing on a processor without AVX-512")
    # The guide also asks for freezing, fixed shapes and no gradients.
    inductor.freezing = True
    compiled = torch.compile(convert_(model), backend="zentorch", dynamic=False)
    return compiled, to_channels_last(inputs)


ENGINE = Engine(
    "zentorch",
    "zentorch",
    prepare,
    cuda=False,
    packages=("zentorch",),
    typical_setup_s=20.0,
)
