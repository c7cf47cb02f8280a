"""What a process may use of the machine, as containers limit it."""

import math
import os
from dataclasses import replace

import pytest

from nhwc import Environment
from nhwc.machine import environment

INSIDE = "0::/"
OUTSIDE = "0::/user.slice/some.service"
OLDER = "4:memory:/docker/abc\n2:cpuacct,cpu:/docker/abc\n0::/"


def written(root, group, files):
    for name, text in {"proc/self/cgroup": group, **files}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n" if text else "")


@pytest.mark.parametrize(
    ("group", "files", "cores"),
    [
        (INSIDE, {"sys/fs/cgroup/cpu.max": "200000 100000"}, 2),
        (INSIDE, {"sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
        (INSIDE, {"sys/fs/cgroup/cpu.max": "10000 100000"}, 1),
        (INSIDE, {"sys/fs/cgroup/cpu.max": "max 100000"}, 64),
        (INSIDE, {"sys/fs/cgroup/cpu.max": "9900000 100000"}, 64),
        (OUTSIDE, {"sys/fs/cgroup/user.slice/cpu.max": "300000 100000"}, 3),
        (
            OUTSIDE,
            {
                "sys/fs/cgroup/user.slice/cpu.max": "300000 100000",
                "sys/fs/cgroup/user.slice/some.service/cpu.max": "max 100000",
            },
            3,
        ),
        (
            OLDER,
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            4,
        ),
        (
            OLDER,
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            64,
        ),
        ("", {}, 64),
        (INSIDE, {"sys/fs/cgroup/cpu.max": ""}, 64),
        ("processor : 0", {"sys/fs/cgroup/cpu.max": "200000 100000"}, 64),
    ],
)
def test_a_container_s_share_of_the_processors_counts(group, files, cores, tmp_path, monkeypatch):
    written(tmp_path, group, files)
    monkeypatch.setattr(environment, "_ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert environment.available_cores() == cores


@pytest.mark.parametrize(
    ("group", "file", "text", "least"),
    [
        (INSIDE, "memory.max", "1048576", 1 << 20),
        (INSIDE, "memory.max", "max", math.inf),
        (INSIDE, "memory.max", "", math.inf),
        (INSIDE, "memory.max", "plenty", math.inf),
        (OUTSIDE, "user.slice/memory.max", "1048576", 1 << 20),
        (OLDER, "memory/memory.limit_in_bytes", "1048576", 1 << 20),
        (OLDER, "memory/memory.limit_in_bytes", "9223372036854771712", math.inf),
    ],
)
def test_a_container_s_memory_counts(group, file, text, least, tmp_path, monkeypatch):
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    written(tmp_path, group, {f"sys/fs/cgroup/{file}": text})
    monkeypatch.setattr(environment, "_ROOT", tmp_path)
    assert environment.memory_bytes() == min(machine, least)


def test_more_threads_than_can_run_are_said_wherever_the_machine_is_named():
    here = replace(Environment.here(), cores=2, threads=2)
    assert "2 of 2 cores" in str(here)
    said = str(replace(here, threads=64))
    assert "64 threads where 2 can run at a time: set OMP_NUM_THREADS=2" in said
