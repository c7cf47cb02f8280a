"""The machine code of the matrix product, for processors that need not be this one."""

import re

import llvmlite.binding as llvm
import pytest

from nhwc.kernels.language import isa
from nhwc.kernels.language.assembler import optimized
from nhwc.kernels.language.compiler import module_of
from nhwc.kernels.product.microkernel import TILE

MACHINES = {
    isa.AVX512: ("x86_64-unknown-linux-gnu", "skylake-avx512"),
    isa.AVX2: ("x86_64-unknown-linux-gnu", "znver3"),
    isa.NEON: ("aarch64-unknown-linux-gnu", "neoverse-n1"),
}


@pytest.mark.parametrize("target", MACHINES, ids=lambda target: target.name)
def test_the_sums_of_a_tile_stay_in_registers(target):
    blocks = re.split(r"^\S+:", assembly(target), flags=re.MULTILINE)
    inner = max(blocks, key=multiplications)
    assert multiplications(inner) >= 4 * target.rows * target.vectors
    on_stack = [line for line in inner.splitlines() if "%rsp" in line or "[sp" in line]
    assert not [line for line in on_stack if re.search(r"[yz]mm|\bq\d", line)]


def multiplications(code):
    return len(re.findall(r"\bvfmadd\w+|\bfmla\b", code))


def assembly(target):
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple, processor = MACHINES[target]
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=processor, opt=2)
    widest = TILE.members(target)[-1]
    return machine.emit_assembly(optimized(module_of(widest, target), machine))
