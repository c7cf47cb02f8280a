"""Object code on disk: found again, never trusted when damaged, never in the way."""

import ctypes
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nhwc import InputError
from nhwc._bench.peak import peak_bytes
from nhwc.kernels.language import assemblers, compiler
from nhwc.kernels.language import isa as isas
from nhwc.kernels.language.compiler import Kernel, Kernels, address_of


def _add_one(e, a, thread, threads):
    begin, end = e.share(a.count, thread, threads)
    with e.range(begin, end) as i:
        place = a.x.floats() + i
        e.write(e.read(place) + 1.0, place)


ROOT = Path(__file__).parents[3]


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)


ADD_ONE = Kernel("add_one", ("x", "count"), _add_one)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has compiled nothing yet, with an empty cache; what it compiles is listed."""
    monkeypatch.setenv("NHWC_CACHE", str(tmp_path))
    forget(monkeypatch)
    compiled = []
    real = compiler.compile_object
    monkeypatch.setattr(
        compiler, "compile_object", lambda k, i: compiled.append(k.name) or real(k, i)
    )
    return compiled


def forget(monkeypatch):
    loaded = compiler.Loaded()
    monkeypatch.setattr(compiler, "_loaded", lambda: loaded)


def works(address):
    x = torch.zeros(5)
    args = (ctypes.c_int64 * 2)(x.data_ptr(), 5)
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_int64] * 3)(address)
    function(ctypes.addressof(args), 0, 1, 0)
    return bool((x == 1).all())


def test_the_second_process_does_not_compile(fresh, monkeypatch, isa):
    assert works(ADD_ONE.address)
    forget(monkeypatch)
    assert works(ADD_ONE.address)
    assert fresh == ["add_one"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda code: code[:-100],
        lambda code: b"",
        lambda code: code.replace(b"nhwc", b"xxxx"),
        lambda code: code[:-1] + bytes([code[-1] ^ 1]),
    ],
)
def test_a_damaged_file_is_compiled_anew(fresh, monkeypatch, tmp_path, damage):
    _ = ADD_ONE.address
    (file,) = (tmp_path / "kernels").iterdir()
    file.write_bytes(damage(file.read_bytes()))
    forget(monkeypatch)
    assert works(ADD_ONE.address)
    assert fresh == ["add_one", "add_one"]
    forget(monkeypatch)
    assert works(ADD_ONE.address)
    assert len(fresh) == 2


def test_a_cache_that_cannot_be_written_only_costs_time(fresh, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("NHWC_CACHE", str(tmp_path / "file"))
    assert works(ADD_ONE.address)


@pytest.mark.parametrize("change", ["_versions", "sources"])
def test_another_processor_or_generator_gets_its_own_file(fresh, monkeypatch, tmp_path, change):
    _ = ADD_ONE.address
    forget(monkeypatch)
    monkeypatch.setattr(compiler, change, lambda: "another")
    _ = ADD_ONE.address
    assert fresh == ["add_one", "add_one"]
    assert len(list((tmp_path / "kernels").iterdir())) == 2


def test_key_is_the_same_in_another_process(tmp_path):
    code = "from tests.kernels.language.test_compiler import ADD_ONE, compiler, isas\n"
    code += "print(compiler._key(ADD_ONE, isas.host()))"
    keys = {python(code).stdout for _ in range(2)}
    assert len(keys) == 1
    assert keys != {""}


def test_threads_compile_different_kernels_at_once_and_the_same_one_once(fresh, monkeypatch, isa):
    real, both = compiler.compile_object, threading.Barrier(2, timeout=30)

    def together(kernel, isa):
        both.wait()
        return real(kernel, isa)

    monkeypatch.setattr(compiler, "compile_object", together)
    another = replace(ADD_ONE, name="add_another")
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(address_of, one, isa) for one in (ADD_ONE, another) * 2]
    addresses = [one.result() for one in asked]
    assert addresses[:2] == addresses[2:]
    assert sorted(fresh) == ["add_another", "add_one"]
    assert all(map(works, addresses[:2]))


def test_kernels_lie_in_a_table_by_number(fresh, isa):
    another = replace(ADD_ONE, name="add_another")
    both = Kernels("both", lambda isa: (ADD_ONE, another))
    table = address_of(both, isa)
    assert list((ctypes.c_int64 * 2).from_address(table)) == [
        address_of(one, isa) for one in (ADD_ONE, another)
    ]
    assert all(map(works, (ctypes.c_int64 * 2).from_address(table)))
    assert sorted(fresh) == ["add_another", "add_one"]
    assert address_of(both, isa) == table


def test_of_a_table_only_what_is_called_is_compiled(fresh, isa):
    another = replace(ADD_ONE, name="add_another")
    both = Kernels("both", lambda isa: (ADD_ONE, another))
    numbers = (ctypes.c_int64 * 2).from_address(address_of(both.only([1, 1]), isa))
    assert list(numbers) == [0, address_of(another, isa)]
    assert works(numbers[1])
    assert [*fresh] == ["add_another"]
    assert both.only([1]) == both.only([1, 1]) != both


def test_several_processes_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("NHWC_CACHE", str(tmp_path))
    code = "from tests.kernels.language.test_compiler import ADD_ONE, works\n"
    code += "assert works(ADD_ONE.address)"
    running = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) for _ in range(4)]
    assert [process.wait() for process in running] == [0] * 4
    assert len(list((tmp_path / "kernels").iterdir())) == 1


@pytest.mark.parametrize("python", ["", "/opt/blender", "/missing/python", "frozen"])
def test_where_no_other_process_can_compile_this_one_does(monkeypatch, isa, python):
    code = compiler.compile_object(ADD_ONE, isa)
    if python == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    else:
        monkeypatch.setattr(sys, "executable", python)
    calls = []
    real = compiler.assembler.compiled
    monkeypatch.setattr(compiler.assembler, "compiled", lambda *a: calls.append(a) or real(*a))
    assert compiler.compile_object(ADD_ONE, isa) == code
    assert len(calls) == 1


def test_a_process_compiles_one_kernel_after_another_and_ends(fresh, monkeypatch, isa):
    started = []
    start = lambda *given, **named: started.append(Popen(*given, **named)) or started[-1]
    Popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(assemblers, "available_cores", lambda: 1)
    monkeypatch.setattr(assemblers, "_queue", assemblers._Queue())
    kernels = [replace(ADD_ONE, name=f"add_{number}") for number in range(3)]
    with ThreadPoolExecutor(3) as pool:
        with assemblers.turn():
            asked = [pool.submit(address_of, one, isa) for one in kernels]
            while assemblers._queue._waiting < 3:
                time.sleep(0.01)
        assert all(works(one.result()) for one in asked)
    [process] = started
    assert process.wait(10) is not None


def test_where_the_process_dies_this_one_compiles(fresh, monkeypatch, isa):
    monkeypatch.setattr(assemblers.assembler, "send", lambda to, *messages: to.close())
    assert works(address_of(ADD_ONE, isa))


@pytest.mark.skipif(peak_bytes() is None, reason="the system does not tell")
def test_compiling_takes_little_memory(tmp_path, monkeypatch):
    monkeypatch.setenv("NHWC_CACHE", str(tmp_path))
    code = """
from nhwc._bench.peak import peak_bytes, reset_peak
from nhwc.kernels.language import assembler, isa
from nhwc.kernels.product import microkernel
assembler.machine(isa.target_features(isa.host()))
reset_peak()
before = peak_bytes()
microkernel.TILE.address
print(peak_bytes() - before)
"""
    # The largest kernel: it was 170 MB when LLVM and all the objects of its assembly were here.
    assert int(python(code).stdout) < 80e6


def test_each_instruction_set_has_its_own_code(isa):
    assert works(address_of(ADD_ONE, isa))


def test_unknown_instruction_set(monkeypatch):
    monkeypatch.setenv("NHWC_ISA", "mmx")
    with pytest.raises(InputError, match="NHWC_ISA=mmx is not one that this machine can run"):
        isas.host()


def test_tiles_fit_their_registers():
    for isa in isas.ALL:
        assert isa.rows * isa.vectors + isa.vectors + 1 <= isa.registers


@pytest.mark.parametrize("module", ["nhwc", "nhwc.kernels", "nhwc._public"])
def test_import_loads_no_compiler(module):
    code = f"import sys, {module}; print(sorted(m for m in sys.modules if m in BAD))"
    code = "BAD = {'llvmlite', 'numba', 'torch._dynamo'}\n" + code
    done = python(code)
    assert done.stdout.strip() == "[]"


def test_without_the_compiler_it_says_why():
    code = "import sys; sys.modules['llvmlite'] = None\n"
    code += "from nhwc import kernels; print(kernels.available(), kernels.unavailable())"
    done = python(code)
    assert done.stdout.startswith("False llvmlite, which comes with numba, is not installed")


ADD_TWO = Kernel("add_two", ("x", "count"), lambda e, a, thread, threads: None)


def test_the_code_of_another_kernel_is_not_run_in_its_place(fresh, monkeypatch, tmp_path):
    _ = ADD_ONE.address, ADD_TWO.address
    one, two = sorted((tmp_path / "kernels").iterdir())
    content = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(content)
    forget(monkeypatch)
    assert works(ADD_ONE.address)
    assert fresh == ["add_one", "add_two", "add_one"]


def test_code_in_a_folder_that_others_can_write_to_is_not_run(fresh, monkeypatch, tmp_path):
    assert works(ADD_ONE.address)
    (tmp_path / "kernels").chmod(0o777)
    forget(monkeypatch)
    assert works(ADD_ONE.address)
    assert fresh == ["add_one", "add_one"]
