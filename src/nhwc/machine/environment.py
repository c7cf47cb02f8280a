"""The machine and the versions that a measurement belongs to."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy
import torch
from torch import Tensor
from torch import device as Device

from ..errors import InputError
from ..shown import first_line


def usable_device(device: Device | str) -> Device:
    """The device of this name; raises InputError if no tensor can lie there.

    >>> usable_device("cpu")
    device(type='cpu')
    """
    try:
        found = Device(device)
        torch.empty(0, device=found)
    except Exception as error:  # Each backend raises its own.
        why = first_line(error).rstrip(".")
        raise InputError(
            f"device {str(device)!r} is not usable here: {why}. Take another, as cpu."
        ) from error
    # There is one processor, whatever its number.
    return Device("cpu") if found.type == "cpu" else found


@contextlib.contextmanager
def beside(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Make new tensors in the processor's memory, if the first of these lies there.

    `torch.set_default_device` would have them made elsewhere, where kernels find no addresses.

    >>> with torch.device("meta"), beside([torch.zeros(1, device="cpu")]):
    ...     torch.zeros(1).device
    device(type='cpu')
    """
    first = next(iter(tensors), None)
    elsewhere = first is not None and first.is_cpu and torch.get_default_device().type != "cpu"
    with Device("cpu") if elsewhere else contextlib.nullcontext():
        yield


@dataclass(frozen=True)
class Environment:
    """The machine and the versions, recorded with every measurement, which means little without.

    >>> Environment.here().torch == torch.__version__
    True
    """

    processor: str
    instruction_set: str
    cores: int
    threads: int
    device: str
    torch: str
    numpy: str
    python: str
    system: str

    @classmethod
    def here(cls, device: Device | str = "cpu") -> Environment:
        """Describe this process as it is now, thread count included."""
        device = Device(device)
        return cls(
            processor=_processor(),
            instruction_set=torch.backends.cpu.get_cpu_capability(),
            cores=available_cores(),
            threads=torch.get_num_threads(),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            torch=torch.__version__,
            numpy=numpy.__version__,
            python=platform.python_version(),
            system=f"{platform.system()} {platform.machine()}",
        )

    @property
    def key(self) -> str:
        """A short hash of this environment; measurements carry over where it is equal."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, str | int]:
        return asdict(self)

    def __str__(self) -> str:
        where = self.device if self.device != "cpu" else f"{self.processor} {self.instruction_set}"
        return f"{where}, {self.threads} of {self.cores} cores, torch {self.torch}"


def available_cores() -> int:
    """The cores this process may use; in a container they may be fewer than the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """The memory this process may use; in a container it may be less than the machine's."""
    if not hasattr(os, "sysconf"):
        return sys.maxsize
    least = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in ("memory.max", "memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            least = min(least, int(Path("/sys/fs/cgroup", limit).read_text()))
    return least


@cache
def second_level_bytes() -> int:
    """What the second-level cache of a core holds; where the system does not say, 512 KiB."""
    with contextlib.suppress(OSError, ValueError):
        size = Path("/sys/devices/system/cpu/cpu0/cache/index2/size").read_text()
        return int(size.strip().removesuffix("K")) << 10
    return 512 << 10


def cache_dir() -> Path:
    """The folder for files kept between runs: `NHWC_CACHE`, or one in the user's cache folder."""
    named = os.environ.get("NHWC_CACHE")
    if named:
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "nhwc"
    except RuntimeError:  # HOME is not set, and the system does not know this user
        return Path(os.devnull, "nhwc")  # no folder: nothing is kept


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    said: dict[str, str] = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        said.setdefault(name.strip(), value.strip())
    found = said.get("model name")
    if found is None:
        return platform.machine()
    if any(letter.isdigit() for letter in found) or "cpu family" not in said:
        return found
    # A virtual machine may hide the processor's name; its family and model then tell it from
    # others, whose measurements differ.
    return f"{found} (family {said['cpu family']}, model {said['model']})"
