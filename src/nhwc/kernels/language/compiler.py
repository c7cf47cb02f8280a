"""From a kernel's Python function to machine code, kept on disk between runs."""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from llvmlite import ir

from ...machine.cache import read_own, write_own
from ...machine.environment import cache_dir
from . import assembler, assemblers
from . import isa as isas
from .isa import Isa
from .sources import sources
from .values import INT, POINTER, Value
from .vectors import Emitter

_lock = threading.Lock()
"""For `_locks` and linkers; each kernel has a lock of its own: several are compiled at once."""
_locks: dict[tuple[str, str], threading.Lock] = {}

_MARK = b"nhwc-kernel-2"


@dataclass(frozen=True)
class Kernel:
    """A compiled function `void (int64 *args, int64 part, int64 parts, int64 worker)` and how it is
    made: it does one of `parts` parts of the work.

    `fields` name the int64 in `args`, in order; floats travel as their bits. `emit` gets an
    Emitter, an object with a Value per field, the part's number and the number of parts. The
    worker is the thread that computes; what it needs to work in is `Args.worker`'s own.
    """

    name: str
    fields: tuple[str, ...]
    emit: Callable[..., None] = field(repr=False)

    @property
    def address(self) -> int:
        """The address of the machine code, which is looked up, loaded from disk or compiled now."""
        return address_of(self, isas.host())


@dataclass(frozen=True)
class Kernels:
    """Kernels of an instruction set that others call by number, through a table of addresses.

    Those that are not `called` are not compiled, and have no address in it.
    """

    name: str
    members: Callable[[Isa], tuple[Kernel, ...]] = field(repr=False)
    called: tuple[int, ...] | None = None

    def only(self, numbers: Iterable[int]) -> Kernels:
        """The same ones, of which others call those with these numbers alone."""
        called = sorted({*numbers})
        return replace(self, name=f"{self.name}{called}", called=tuple(called))

    @property
    def address(self) -> int:
        """The address of the table."""
        return address_of(self, isas.host())


def _after_fork() -> None:
    # A child has none of the threads that may have held a lock when it was forked.
    global _lock
    _lock = threading.Lock()
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True)
class Loaded:
    """Where code lies that can run, by the names of kernel and instruction set.

    `linkers` hold it: one for all kernels of the same features, since each takes as much memory as
    the code of several. Tables of addresses live as long as anyone may call what they name.
    """

    addresses: dict[tuple[str, str], int] = field(default_factory=dict)
    tables: list[Any] = field(default_factory=list)
    linkers: dict[str, Any] = field(default_factory=dict)


@cache
def _loaded() -> Loaded:
    return Loaded()


def address_of(kernel: Kernel | Kernels, isa: Isa) -> int:
    """The address of `kernel` compiled for `isa`; the same one on every call."""
    key = (kernel.name, isa.name)
    found = _loaded().addresses.get(key)
    if found is None:
        with _lock:
            own = _locks.setdefault(key, threading.Lock())
        with own:
            found = _loaded().addresses.get(key) or _made(kernel, isa)
            _loaded().addresses[key] = found
    return found


def _made(kernel: Kernel | Kernels, isa: Isa) -> int:
    if isinstance(kernel, Kernel):
        return _load(kernel, isa)
    members = kernel.members(isa)
    table = (ctypes.c_int64 * len(members))()
    called = range(len(members)) if kernel.called is None else kernel.called
    with ThreadPoolExecutor(len(members)) as pool:
        made = pool.map(lambda number: address_of(members[number], isa), called)
        for number, address in zip(called, made, strict=True):
            table[number] = address
    _loaded().tables.append(table)
    return ctypes.addressof(table)


def _load(kernel: Kernel, isa: Isa) -> int:
    file = cache_dir() / "kernels" / f"{kernel.name}-{isa.name}-{_key(kernel, isa)}.o"
    code = _read(file)
    if code is None:
        code = compile_object(kernel, isa)
        _write(file, code)
    return _link(kernel, isa, code)


def _key(kernel: Kernel, isa: Isa) -> str:
    parts = (kernel.name, ",".join(kernel.fields), repr(isa), isas.target_features(isa))
    return hashlib.sha256("\n".join((*parts, sources(), _versions())).encode()).hexdigest()[:24]


def _versions() -> str:
    import llvmlite
    import llvmlite.binding as llvm

    cpu = llvm.get_host_cpu_name()
    return f"{llvmlite.__version__} {llvm.llvm_version_info} {llvm.get_process_triple()} {cpu}"


def _read(file: Path) -> bytes | None:
    """The object code in `file`, unless it is missing, damaged, or another kernel's."""
    mark, _, rest = (read_own(file) or b"").partition(b"\n")
    digest, _, code = rest.partition(b"\n")
    return code if mark == _MARK and digest == _digest(file, code) else None


def _write(file: Path, code: bytes) -> None:
    """Keep `code` for the next process; a folder that cannot be used costs only time."""
    write_own(file, b"\n".join((_MARK, _digest(file, code), code)))


def _digest(file: Path, code: bytes) -> bytes:
    """Digest the code and the file's name, which names everything that the code was made from."""
    return hashlib.sha256(file.name.encode() + b"\n" + code).hexdigest().encode()


def module_of(kernel: Kernel, isa: Isa) -> str:
    """The kernel as LLVM assembly, before any optimization."""

    module = ir.Module(name=kernel.name)
    kind = ir.FunctionType(ir.VoidType(), [POINTER, INT, INT, INT])
    function = ir.Function(module, kind, f"nhwc_{kernel.name}")
    emitter = Emitter(isa, module, ir.IRBuilder(function.append_basic_block("entry")))
    block, part, parts, worker = (Value(emitter, a) for a in function.args)
    given = block.integers()
    values = {name: emitter.read(given + i) for i, name in enumerate(kernel.fields)}
    kernel.emit(emitter, Args(values, given, worker), part, parts)
    emitter.builder.ret_void()
    # Without this LLVM turns short loops that copy or clear into calls of memcpy and memset.
    return (
        str(module)
        .replace(")\n{", ') "no-builtins" nounwind\n{')
        .replace(") noinline\n{", ') noinline "no-builtins" nounwind\n{')
    )


class Args:
    """The arguments of a kernel by name, the `words` they lie in, and the number of the worker."""

    def __init__(self, values: dict[str, Any], words: Any, worker: Any) -> None:
        self._values, self.words, self.worker = values, words, worker

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(f"the kernel has no argument {name}") from None

    def but(self, **others: Any) -> Args:
        """The same arguments with some replaced: a kernel within a kernel."""
        return Args({**self._values, **others}, self.words, self.worker)


def compile_object(kernel: Kernel, isa: Isa) -> bytes:
    """Compile `kernel` to object code."""
    with assemblers.turn():
        return assemblers.object_code(module_of(kernel, isa), isas.target_features(isa))


def _link(kernel: Kernel, isa: Isa, code: bytes) -> int:
    import llvmlite.binding as llvm

    with _lock:
        linker = _linker(isas.target_features(isa))
        linker.add_object_file(llvm.ObjectFileRef.from_data(code))
        linker.finalize_object()
        return int(linker.get_function_address(f"nhwc_{kernel.name}"))


def _linker(features: str) -> Any:
    import llvmlite.binding as llvm

    linkers = _loaded().linkers
    if features not in linkers:
        machine = assembler.machine(features)
        linkers[features] = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    return linkers[features]
