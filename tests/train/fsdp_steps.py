"""Run under torchrun: steps with FSDP2 beside the same steps in one piece."""

import os
import sys

import torch
import torch.distributed as dist

from nhwc import Format, convert_, format_of
from nhwc._train import TrainingStep, shard_
from tests.train.training_nets import plain


def main(output: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    whole, sharded = convert_(plain()), shard_(convert_(plain()))
    seen = []
    sharded[2].register_forward_hook(lambda module, args, out: seen.append(format_of(out)))
    steps = [
        TrainingStep(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        for net in (whole, sharded)
    ]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        pixels = torch.randn(8, 3, 12, 12, generator=generator)
        pixels = pixels.to(memory_format=torch.channels_last)
        labels = torch.randint(10, (8,), generator=generator)
        steps[0](pixels, labels)
        steps[1](pixels[rank::2], labels[rank::2])
    full = [parameter.full_tensor() for parameter in sharded.parameters()]
    pairs = zip(full, whole.parameters(), strict=True)
    torch.save(
        {
            "errors": [float((a - b).detach().abs().max()) for a, b in pairs],
            "local": [p.to_local().shape[0] for p in sharded.parameters()],
            "kept": set(seen) == {Format.CHANNELS_LAST},
        },
        f"{output}.{rank}",
    )
    dist.barrier()
    dist.destroy_process_group()
    # Threads of torch that still run abort the process where Python ends it.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
