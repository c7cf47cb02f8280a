"""A plugin of pytest that runs the kernels for ARM's NEON on an emulated processor: `make arm`.

It needs unicorn, the emulator, and the linker of binutils for aarch64. The tests are those of the
other instruction sets; compiled functions work on this process's own memory, on one thread.
"""

import ctypes
import struct
import subprocess
import tempfile
import threading
from pathlib import Path

import llvmlite.binding as llvm
import pytest
import unicorn
from unicorn import arm64_const as registers

from nhwc.kernels.language import assembler, assemblers, compiler, isa
from nhwc.kernels.language.vectors import Emitter
from nhwc.kernels.tape import threads

CODE, STACK, RETURN = 1 << 36, 1 << 37, 1 << 38
"""Where compiled functions, the stack and the place they return to lie; nothing of ours does."""
PAGE = 4096
FLOATING_POINT_ON = 3 << 20


class Processor:
    """An emulated ARM processor that sees the pages of this process as it touches them."""

    def __init__(self):
        self.core = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        self.core.ctl_set_cpu_model(registers.UC_CPU_ARM64_MAX)
        self.core.reg_write(registers.UC_ARM64_REG_CPACR_EL1, FLOATING_POINT_ON)
        self.core.mem_map(STACK - (1 << 22), 1 << 22)
        self.core.mem_map(RETURN, PAGE)
        unmapped = unicorn.UC_HOOK_MEM_READ_UNMAPPED | unicorn.UC_HOOK_MEM_WRITE_UNMAPPED
        self.core.hook_add(unmapped, self._show)
        self.shown, self.free, self.calls = set(), CODE, 0

    def _show(self, core, access, address, size, value, _):
        pages = {at // PAGE * PAGE for at in (address, address + size - 1)} - self.shown
        for page in pages:
            may = unicorn.UC_PROT_READ | unicorn.UC_PROT_WRITE
            core.mem_map_ptr(page, PAGE, may, ctypes.c_void_p(page))
        self.shown |= pages
        return bool(pages)

    def load(self, name, code):
        """Link the object code of a function, and return the function's address."""
        with tempfile.TemporaryDirectory() as folder:
            source, linked = Path(folder, "code.o"), Path(folder, "code")
            source.write_bytes(code)
            command = ["aarch64-linux-gnu-ld", "-static", "--omagic", "--no-warn-rwx-segments"]
            command += [f"-Ttext={self.free:#x}", f"--entry={name}", source, "-o", linked]
            subprocess.run(command, check=True)
            image = linked.read_bytes()
        entry, headers = struct.unpack_from("<QQ", image, 24)
        (count,) = struct.unpack_from("<H", image, 56)
        for number in range(count):
            segment = struct.unpack_from("<IIQQQQQQ", image, headers + 56 * number)
            kind, _, offset, address, _, in_file, in_memory, _ = segment
            if kind == 1:
                begin, end = address // PAGE * PAGE, -(-(address + in_memory) // PAGE) * PAGE
                self.core.mem_map(begin, end - begin)
                self.core.mem_write(address, image[offset : offset + in_file])
                self.free = max(self.free, end + PAGE)
        return entry

    def run(self, function, args):
        # What was shown may have been freed, and be something else now.
        for page in self.shown:
            self.core.mem_unmap(page, PAGE)
        self.shown = set()
        given = {"SP": STACK - PAGE, "X30": RETURN, "X0": args, "X1": 0, "X2": 1, "X3": 0}
        for name, value in given.items():
            self.core.reg_write(getattr(registers, f"UC_ARM64_REG_{name}"), value)
        self.core.emu_start(function, RETURN)
        self.calls += 1


PROCESSOR = Processor()
LOADING = threading.Lock()


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests():
    """Before there are tests: they ask which instruction sets this machine can run."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    here = {**isa.host_features(), "neon": True}
    isa.host_features = lambda: here
    isa.target_features = _or_else(isa.target_features, lambda of: "+neon", at=0)
    assemblers.object_code = _or_else(assemblers.object_code, _object_code, at=1)
    compiler._link = _or_else(compiler._link, _link, at=1)
    threads.region = _or_else(threads.region, _region, at=0)
    # One thread waits for nobody, and the instruction is that of the real processor.
    Emitter.pause = lambda self: None


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"{PROCESSOR.calls} calls on an emulated processor")


def _or_else(usual, emulated, at):
    """`emulated` where the argument at this place belongs to NEON, else `usual`."""

    def is_emulated(value):
        address = isinstance(value, int) and CODE <= value < STACK
        return address or value == "+neon" or value == isa.NEON

    return lambda *given: (emulated if is_emulated(given[at]) else usual)(*given)


def _object_code(assembly, features):
    target = llvm.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine(
        cpu="neoverse-n1", features=features, opt=2, reloc="static", codemodel="large"
    )
    return bytes(target.emit_object(assembler.optimized(assembly, target)))


def _link(kernel, of, code):
    # Several threads compile the members of a table.
    with LOADING:
        return PROCESSOR.load(f"nhwc_{kernel.name}", code)


def _region(function, args, wanted):
    return lambda: PROCESSOR.run(function, args)
