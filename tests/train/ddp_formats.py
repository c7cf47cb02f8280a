"""Run under torchrun: real DistributedDataParallel training steps, one after the other.

Writes the findings of each process: warnings, strides of weights and gradients, the gradients.
"""

import os
import sys
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nhwc import Format, convert_
from tests.train.training_nets import plain, volume


@dataclass(frozen=True)
class Case:
    format: Format | None = Format.CHANNELS_LAST
    """What `convert_` is asked for; None for `.contiguous(memory_format=...)` of each weight."""
    dimensions: int = 4
    bucket_view: bool = True
    autocast: bool = False


CASES = {
    "bucket-view": Case(),
    "copies": Case(bucket_view=False),
    "bfloat16": Case(autocast=True),
    "volumes": Case(dimensions=5),
    "contiguous": Case(Format.CONTIGUOUS),
    "naive": Case(None),
}


def main(output: str) -> None:
    dist.init_process_group("gloo")
    found = {name: step(case, dist.get_rank()) for name, case in CASES.items()}
    torch.save(found, f"{output}.{dist.get_rank()}")
    # Who leaves early closes connections that the other may still be reading from.
    dist.barrier()
    dist.destroy_process_group()
    # Threads of torch that still run abort the process where Python ends it.
    os._exit(0)
    # A thread of torch's that asks for the interpreter while that shuts down aborts the process.
    os._exit(0)


def step(case: Case, rank: int) -> dict[str, object]:
    net = converted(plain() if case.dimensions == 4 else volume(), case.format)
    wrapped = DistributedDataParallel(net, gradient_as_bucket_view=case.bucket_view)
    shape = (4, 3, *[12] * 2) if case.dimensions == 4 else (4, 3, 6, 12, 12)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))[rank::2]
    last = torch.channels_last if case.dimensions == 4 else torch.channels_last_3d
    layout = torch.contiguous_format if case.format is Format.CONTIGUOUS else last
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # The second step meets the buckets as the first one rebuilt them.
        for _ in range(2):
            wrapped.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                loss = wrapped(images.to(memory_format=layout)).float().square().mean()
            loss.backward()
    return {
        "warnings": [str(warning.message) for warning in caught],
        "strides": {n: (p.stride(), p.grad.stride()) for n, p in net.named_parameters()},
        "gradients": {n: p.grad.contiguous() for n, p in net.named_parameters()},
    }


def converted(net: nn.Module, format: Format | None) -> nn.Module:
    if format is not None:
        return convert_(net, format)
    for p in net.parameters():
        if p.ndim == 4:
            p.data = p.data.contiguous(memory_format=torch.channels_last)
    return net


if __name__ == "__main__":
    main(*sys.argv[1:])
