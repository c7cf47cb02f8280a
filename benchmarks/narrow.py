"""Hide AVX-512 from every engine: a race of kernels for AVX2 on a processor that has more.

    python -m benchmarks.narrow nhwc bench resnet50 --seconds 2

runs the command behind it. nhwc and torch can be told which instructions to use; the others ask
the processor, so they are copied, and each `cpuid` in the copies becomes a trap that `narrow.c`
answers. Needs gcc and objdump. MKL, which torch's linear layers may call, is not held.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from nhwc.machine.environment import cache_dir

LIBRARIES = {
    "onnxruntime": ("capi/onnxruntime_pybind11_state*.so",),
    "openvino": ("libs/libopenvino.so*", "libs/libopenvino_intel_cpu_plugin.so"),
    "cv2": ("cv2.*.so",),
    "ncnn": ("ncnn.*.so",),
    "_mnncengine": ("_mnncengine.*.so",),
    "executorch": ("lib/*.so", "extension/pybindings/*.so"),
}
"""Of each package, or module of one file, the libraries that hold its kernels."""

CPUID, TRAP = b"\x0f\xa2", b"\xcc\x90"

TOLD = {"NHWC_ISA": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


def main() -> None:
    if not sys.argv[1:]:
        sys.exit("say what to run: python -m benchmarks.narrow nhwc bench resnet50")
    folder = cache_dir() / "narrow"
    folder.mkdir(parents=True, exist_ok=True)
    answers = folder / "narrow.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", answers, source], check=True)
    for package, names in LIBRARIES.items():
        _copy(package, names, folder)
    before = [path] if (path := os.environ.get("PYTHONPATH")) else []
    os.environ |= TOLD | {"LD_PRELOAD": str(answers)}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *before])
    os.execvp(sys.argv[1], sys.argv[1:])


def _copy(package: str, names: tuple[str, ...], folder: Path) -> None:
    found = find_spec(package)
    if found is None or (folder / f"{package}.done").exists():
        return
    places = found.submodule_search_locations
    origin = Path(next(iter(places)) if places else str(found.origin))
    copy = folder / origin.name
    if places:
        shutil.copytree(origin, copy, dirs_exist_ok=True)
    else:
        shutil.copy(origin, copy)
    for libraries in origin.parent.glob("*.libs"):  # what a wheel brings along, found beside it
        if not (link := folder / libraries.name).exists():
            link.symlink_to(libraries)
    inside = copy if places else folder
    for library in sorted({path for name in names for path in inside.glob(name)}):
        print(f"narrowing {library.name}", flush=True)
        code = bytearray(library.read_bytes())
        for place in _places(library):
            assert code[place : place + 2] == CPUID, f"no cpuid at {place:#x} of {library}"
            code[place : place + 2] = TRAP
        library.write_bytes(code)
    (folder / f"{package}.done").touch()


def _places(library: Path) -> list[int]:
    """Return the offset in the file of every `cpuid` that objdump disassembles."""
    places, difference = [], 0
    listing = ["objdump", "-d", "--no-show-raw-insn", "--file-offsets", str(library)]
    with subprocess.Popen(listing, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        for line in process.stdout:
            if begin := re.match(r"([0-9a-f]+) <.*\(File Offset: 0x([0-9a-f]+)\)", line):
                difference = int(begin[2], 16) - int(begin[1], 16)
            elif line.rstrip().endswith("\tcpuid"):
                places.append(int(line.split(":")[0], 16) + difference)
    return places


if __name__ == "__main__":
    main()
