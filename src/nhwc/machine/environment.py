"""The machine and the versions that a measurement belongs to."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
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

_ROOT = Path("/")


def usable_device(device: Device | str) -> Device:
    """The device of this name; raises InputError if no tensor can lie there.

    >>> usable_device("cpu")
    device(type='cpu')
    """
    try:
        found = Device(device)
        torch.empty(0, device=found)
    except Exception as error:  # Each backend raises its own.
        why = first_line(error).partition(". ")[0].rstrip(".")  # Then come a page of advice.
        raise InputError(
            f"device {str(device)!r} is not usable here: {why}. Take another, as cpu."
        ) from error
    if found.type == "meta":
        raise InputError("device 'meta' is not usable here: nothing is computed there. Take cpu.")
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
        threads = f"{self.threads} of {self.cores} cores"
        if self.threads > self.cores:
            threads = f"{self.threads} threads where {self.cores} can run at a time: "
            threads += f"set OMP_NUM_THREADS={self.cores}"
        return f"{where}, {threads}, torch {self.torch}"


def available_cores() -> int:
    """The cores this process may use; in a container they may be fewer than the machine's."""
    known = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
    return max(1, math.ceil(min(cores, _time_allowed())))


def _time_allowed() -> float:
    """How many cores' time the containers around this process leave it; infinite without limit."""
    limits = _limits("cpu", "cpu.max") + _limits("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us")
    return min((quota / period for quota, period in limits), default=math.inf)


def memory_bytes() -> int:
    """The memory this process may use; in a container it may be less than the machine's."""
    if not hasattr(os, "sysconf"):
        return sys.maxsize
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = _limits("memory", "memory.max") + _limits("memory", "memory.limit_in_bytes")
    return min([machine, *(limit for (limit,) in limits)])


def _limits(controller: str, *files: str) -> list[list[int]]:
    """The numbers in `files` of the control groups that this process is in: its own and those
    around it. Where they say anything else, such as "max", there is no limit.

    A container sees its own group as the root; those of the older layout still have the path that
    the host knows, which leads nowhere in there.
    """
    found = []
    with contextlib.suppress(OSError):
        for line in (_ROOT / "proc/self/cgroup").read_text().splitlines():
            controllers, _, path = line.partition(":")[2].partition(":")
            others = controllers and controller not in controllers.split(",")
            if others or not path.startswith("/"):
                continue
            groups = _ROOT / "sys/fs/cgroup" / (controller if controllers else "")
            for group in (Path(path), *Path(path).parents):
                with contextlib.suppress(OSError):
                    place = groups / group.relative_to("/")
                    words = [word for file in files for word in (place / file).read_text().split()]
                    if words and all(map(str.isdigit, words)):
                        found.append([*map(int, words)])
    return found


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
