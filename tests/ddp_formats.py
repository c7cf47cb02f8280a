"""Run under torchrun: one real DistributedDataParallel training step, in the format named.

Writes what each process saw: warnings, strides of weights and gradients, the gradients.
"""

import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from nhwc import Format, convert_
from tests.training_nets import plain, volume


def main(output: str, format: str, dimensions: str, bucket_view: str, autocast: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = convert_(plain() if dimensions == "4" else volume(), Format(format))
    wrapped = DistributedDataParallel(net, gradient_as_bucket_view=bucket_view == "True")
    shape = (4, 3, 12, 12) if dimensions == "4" else (4, 3, 6, 12, 12)
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0))[rank::2]
    last = torch.channels_last if dimensions == "4" else torch.channels_last_3d
    layout = torch.contiguous_format if format == "contiguous" else last
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # The second step meets the buckets as the first one rebuilt them.
        for _ in range(2):
            wrapped.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast == "True"):
                loss = wrapped(images.to(memory_format=layout)).float().square().mean()
            loss.backward()
    torch.save(
        {
            "warnings": [str(warning.message) for warning in caught],
            "strides": {n: (p.stride(), p.grad.stride()) for n, p in net.named_parameters()},
            "gradients": {n: p.grad.contiguous() for n, p in net.named_parameters()},
        },
        f"{output}.{rank}",
    )
    # Who leaves early closes connections that the other may still be reading from.
    dist.barrier()
    dist.destroy_process_group()
    # A thread of torch's that asks for the interpreter while that shuts down aborts the process.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
