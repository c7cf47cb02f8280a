"""Small nets and runs for the training tests; also named as file.py:callable on command lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import nhwc
from nhwc import Format, format_of

FILE = Path(__file__)
SOURCE = Path(nhwc.__file__).parents[1]


def plain() -> nn.Module:
    """Every kind of 4-D weight whose strides are doubtful, and nothing that looks at the batch."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Conv2d(8, 12, 1),
        nn.ReLU(),
        nn.Conv2d(12, 1, 1),
        nn.Conv2d(1, 8, 3, stride=2),
        nn.ConvTranspose2d(8, 6, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 10),
    )


def drops() -> nn.Module:
    """Draws random numbers and keeps statistics: what resuming must restore."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def volume() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv3d(3, 8, 3),
        nn.BatchNorm3d(8),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )


def unlucky() -> nn.Module:
    """Cannot be made in process 1."""
    if os.environ.get("RANK") == "1":
        raise RuntimeError("no luck here")
    return plain()


def killed() -> nn.Module:
    """Its process is killed at the batch that KILLED_AT names: at the same one on any machine."""
    return _Killed(drops())


class _Killed(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.seen = net, 0

    def forward(self, images: Tensor) -> Tensor:
        self.seen += 1
        if str(self.seen) == os.environ.get("KILLED_AT"):
            os.kill(os.getpid(), signal.SIGKILL)
        return self.net(images)


def dies() -> nn.Module:
    """In process 1 the third batch ends the process, on the first start only."""
    return _Dies(plain())


class _Dies(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.seen = net, 0

    def forward(self, images: Tensor) -> Tensor:
        self.seen += 1
        first_start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if self.seen == 3 and os.environ.get("RANK") == "1" and first_start:
            os._exit(7)
        return self.net(images)


def synchronized() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4), nn.Flatten(), nn.Linear(4 * 14 * 14, 10)
    )


def idle() -> nn.Module:
    """Has two parameters that its loss does not use."""
    net = plain()
    net[2].spare = nn.Conv2d(3, 4, 1)
    return net


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(10))


class LayoutCopies(TorchDispatchMode):
    """Lists the operators that give a 4-D or 5-D tensor another layout than it had."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        clear = (Format.CONTIGUOUS, Format.CHANNELS_LAST, Format.CHANNELS_LAST_3D)
        if isinstance(out, Tensor) and out.ndim >= 4:
            tensors = [t for t in args if isinstance(t, Tensor) and t.ndim >= 4]
            layouts = {format_of(t) for t in (*tensors, out)}
            view = any(t.data_ptr() == out.data_ptr() for t in tensors)
            if len(layouts & set(clear)) > 1 and not view:
                self.found.append(str(func))
        return out


def image_set(root: Path, *, train: int = 12, val: int = 4, side: int = 20) -> Path:
    """Three classes of flat colours with some noise, as PNG files."""
    rng = np.random.default_rng(0)
    for part, count in (("train", train), ("val", val)):
        for label, name in enumerate(("blue", "green", "red")):
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 90, (side, side, 3), dtype=np.uint8)
                pixels[..., 2 - label] += 150
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "PYTHONPATH": f"{SOURCE}:{FILE.parents[2]}", "OMP_NUM_THREADS": "1", **more}


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "nhwc", "train", *map(str, words)]


def launched(*words: object, processes: int = 2, restarts: int = 0) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += [f"--nproc-per-node={processes}", f"--max-restarts={restarts}"]
    return [*launcher, *map(str, words)]


def torchrun(*words: object, processes: int = 2, restarts: int = 0) -> subprocess.CompletedProcess:
    return subprocess.run(
        launched(*words, processes=processes, restarts=restarts),
        env=environment(),
        capture_output=True,
        text=True,
    )
