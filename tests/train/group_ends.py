"""Run under torchrun: a step in a process group, and which threads there are then and after."""

from pathlib import Path

import torch
from torch import nn

from nhwc._train import process_group
from nhwc._train.distributed import parallel


def threads() -> str:
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return "gloo" if any("gloo" in name for name in names) else "none"


def step(device: torch.device) -> None:
    model = parallel(nn.Linear(2, 2), device)
    model(torch.ones(1, 2)).sum().backward()
    print(f"during: {threads()}")


with process_group(torch.device("cpu")) as group_device:
    step(group_device)
print(f"after: {threads()}")
