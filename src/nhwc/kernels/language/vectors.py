"""A small language for kernels: Python expressions that write LLVM instructions.

A kernel is a Python function that gets an `Emitter` and calls it; what it computes with are
`Value`s, whose operators emit instructions. Lengths and strides are values too, so one compiled
kernel serves every shape; what Python knows while it runs (the vector width, the tile) is constant
in the code, and a Python loop is an unrolled one.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from llvmlite import ir

from .isa import Isa
from .values import FLOAT, INT, POINTER, WORD, Value, Writer


class _Function(ir.Function):
    """A function that is mere text once it is complete: as objects it takes twenty times that."""

    _text = ""

    def write_down(self) -> None:
        self._text = super().__str__()
        for block in self.blocks:
            # Blocks and their instructions hold one another.
            block.instructions, block.terminator = [], None
        self.blocks.clear()

    def __str__(self) -> str:
        return self._text or str(super().__str__())


class Emitter(Writer):
    """Writes the body of one function; see the module's docstring."""

    def __init__(self, isa: Isa, module: ir.Module, builder: ir.IRBuilder) -> None:
        super().__init__(builder, isa.width)
        self.isa, self.module = isa, module

    def of_width(self, width: int) -> Emitter:
        """An emitter for the same function, with narrower vectors."""
        return Emitter(replace(self.isa, width=width), self.module, self.builder)

    def variable(self, start: Any) -> Variable:
        """A variable; a Python int starts an int64, a Python float a vector."""
        kind = INT if isinstance(start, int) else self.vector_type
        return Variable(self, self.value(start, kind))

    # Memory.

    def load(self, pointer: Value, mask: Value | None = None) -> Value:
        """A vector from `pointer` on, unaligned; lanes outside `mask` are not read and zero."""
        if mask is None:
            return Value(self, self.builder.load(pointer.llvm, align=4, typ=self.vector_type))
        read = self._intrinsic(
            f"llvm.masked.load.v{self.width}f32.p0",
            self.vector_type,
            [POINTER, WORD, mask.llvm.type, self.vector_type],
        )
        align, other = ir.Constant(WORD, 4), self.vector().llvm
        return Value(self, self.builder.call(read, [pointer.llvm, align, mask.llvm, other]))

    def store(self, vector: Value, pointer: Value, mask: Value | None = None) -> None:
        """Write `vector` from `pointer` on; lanes outside `mask` are not touched."""
        if mask is None:
            self.builder.store(vector.llvm, pointer.llvm, align=4)
            return
        write = self._intrinsic(
            f"llvm.masked.store.v{self.width}f32.p0",
            ir.VoidType(),
            [self.vector_type, POINTER, WORD, mask.llvm.type],
        )
        align = ir.Constant(WORD, 4)
        self.builder.call(write, [vector.llvm, pointer.llvm, align, mask.llvm])

    def read(self, pointer: Value) -> Value:
        """The one int64 or float32 that `pointer` points to."""
        loaded = self.builder.load(pointer.llvm, typ=pointer.element)
        return Value(self, loaded)

    def pair(self, pointer: Value) -> Value:
        """The two float32 from `pointer` on, in every two neighbouring lanes."""
        both = self.builder.load(pointer.llvm, align=4, typ=ir.DoubleType())
        every = self._splat(both, self.width // 2)
        return Value(self, self.builder.bitcast(every, self.vector_type))

    def write(self, scalar: Any, pointer: Value) -> None:
        """Write one int64 or float32."""
        self.builder.store(self.value(scalar, pointer.element).llvm, pointer.llvm)

    def prefetch(self, pointer: Value, write: bool = False, level: int = 3) -> None:
        """Ask for the cache line of `pointer`, which need not exist."""
        kinds = [POINTER, WORD, WORD, WORD]
        ask = self._intrinsic("llvm.prefetch.p0", ir.VoidType(), kinds)
        how = [ir.Constant(WORD, number) for number in (int(write), level, 1)]
        self.builder.call(ask, [pointer.llvm, *how])

    def after(self, pointer: Value, vectors: Sequence[Value]) -> Value:
        """The same pointer, but nothing is read there before `vectors` have been computed.

        By itself LLVM reads ahead until it runs out of registers.
        """
        given = [pointer.llvm, *(vector.llvm for vector in vectors)]
        kind = ir.FunctionType(POINTER, [value.type for value in given])
        register = ",w" if self.isa.name == "neon" else ",v"
        same = ir.InlineAsm(kind, "", "=r,0" + register * len(vectors))
        return Value(self, self.builder.call(same, given), pointer.element)

    def stack(self, count: int, element: ir.Type = FLOAT) -> Value:
        """Room for `count` elements while the function runs, aligned to a cache line."""
        with self.builder.goto_entry_block():
            room = self.builder.alloca(ir.ArrayType(element, count))
            room.align = 64
            # llvmlite still types what alloca returns; every other pointer here is opaque.
            room.type = POINTER
        return Value(self, room, element)

    # Arithmetic.

    def fma(self, a: Any, b: Any, c: Any) -> Value:
        """a * b + c, rounded once where the processor can."""
        left, right = self.alike(a, b)
        added = self.value(c, left.llvm.type)
        if not self.isa.fma:
            return left * right + added
        kind = left.llvm.type
        suffix = f"v{kind.count}f32" if isinstance(kind, ir.VectorType) else "f32"
        fused = self._intrinsic(f"llvm.fma.{suffix}", kind, [kind] * 3)
        return Value(self, self.builder.call(fused, [left.llvm, right.llvm, added.llvm]))

    def max(self, a: Any, b: Any) -> Value:
        """The larger; `b` where either is not a number, so put there what must come through."""
        left, right = self.alike(a, b)
        return self.select(left > right, left, right)

    def min(self, a: Any, b: Any) -> Value:
        """The smaller; `b` where either is not a number."""
        left, right = self.alike(a, b)
        return self.select(left < right, left, right)

    def sqrt(self, value: Value) -> Value:
        """The square root of a vector."""
        kind = value.llvm.type
        root = self._intrinsic(f"llvm.sqrt.v{self.width}f32", kind, [kind])
        return Value(self, self.builder.call(root, [value.llvm]))

    def select(self, condition: Value, yes: Any, no: Any) -> Value:
        """`yes` where `condition` holds, else `no`, lane by lane if it is a mask."""
        left, right = self.alike(yes, no)
        chosen = self.builder.select(condition.llvm, left.llvm, right.llvm)
        return Value(self, chosen, left.element)

    # Control.

    @contextmanager
    def range(self, start: Any, stop: Any, step: Any = 1) -> Iterator[Value]:
        """The body once for each value from `start` up to, not including, `stop`."""
        start, stop, step = (self.value(v, INT) for v in (start, stop, step))
        before = self.builder.block
        body = self.builder.append_basic_block("loop")
        after = self.builder.append_basic_block("done")
        self.builder.cbranch((start < stop).llvm, body, after)
        self.builder.position_at_end(body)
        index = self.builder.phi(INT)
        index.add_incoming(start.llvm, before)
        yield Value(self, index)
        following = Value(self, index) + step
        index.add_incoming(following.llvm, self.builder.block)
        self.builder.cbranch((following < stop).llvm, body, after)
        self.builder.position_at_end(after)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """The body only where `condition` holds."""
        with self.builder.if_then(condition.llvm):
            yield

    def branch(self, condition: Value, yes: Callable[[], object], no: Callable[[], object]) -> None:
        """Run what `yes` emits where `condition` holds, else what `no` emits."""
        with self.builder.if_else(condition.llvm) as (then, otherwise):
            with then:
                yes()
            with otherwise:
                no()

    def switch(self, choice: Value, cases: Mapping[int, Callable[[], object]]) -> None:
        """Run what the case of this number emits, and nothing for a number without a case."""
        after = self.builder.append_basic_block("chosen")
        jump = self.builder.switch(choice.llvm, after)
        for number, emit in cases.items():
            block = self.builder.append_basic_block(f"case{number}")
            jump.add_case(ir.Constant(INT, number), block)
            self.builder.position_at_end(block)
            emit()
            self.builder.branch(after)
        self.builder.position_at_end(after)

    def share(self, count: Value, thread: Value, threads: Value) -> tuple[Value, Value]:
        """The part of `count` pieces of work, begin and end, that is this thread's."""
        return count * thread // threads, count * (thread + 1) // threads

    def function(
        self, name: str, kinds: Sequence[ir.Type], emit: Callable[..., None]
    ) -> Callable[..., None]:
        """A function of the same module, emitted at first mention; returns what emits a call.

        `emit` gets an Emitter of its own and one Value per kind. Pointers are to float32.
        """
        known = self.module.globals.get(name)
        if known is None:
            known = _Function(self.module, ir.FunctionType(ir.VoidType(), kinds), name)
            known.linkage = "internal"
            known.attributes.add("noinline")
            inner = Emitter(self.isa, self.module, ir.IRBuilder(known.append_basic_block()))
            emit(
                inner, *(Value(inner, a, FLOAT if a.type == POINTER else None) for a in known.args)
            )
            inner.builder.ret_void()
            known.write_down()

        def call(*values: Any) -> None:
            given = [self.value(v, k).llvm for v, k in zip(values, kinds, strict=True)]
            self.builder.call(known, given)

        return call

    def call(self, address: Value, result: ir.Type | None, values: Sequence[Value]) -> Value:
        """Call the function at `address`, C calling convention."""
        kind = ir.FunctionType(result or ir.VoidType(), [v.llvm.type for v in values])
        pointer = self.builder.inttoptr(address.llvm, kind.as_pointer())
        return Value(self, self.builder.call(pointer, [v.llvm for v in values]))

    def widen(self, word: Value) -> Value:
        """A 32-bit integer, as C functions return them, as an int64."""
        return Value(self, self.builder.sext(word.llvm, INT))

    def pause(self) -> None:
        """Tell the processor that this loop only waits."""
        machine = platform.machine().lower()
        if machine in ("x86_64", "amd64"):
            self.builder.call(self._intrinsic("llvm.x86.sse2.pause", ir.VoidType(), []), [])
        elif machine in ("aarch64", "arm64"):
            hint = self._intrinsic("llvm.aarch64.hint", ir.VoidType(), [WORD])
            self.builder.call(hint, [ir.Constant(WORD, 1)])

    def _intrinsic(self, name: str, result: ir.Type, kinds: list[ir.Type]) -> ir.Function:
        known = self.module.globals.get(name)
        return known or ir.Function(self.module, ir.FunctionType(result, kinds), name)


class Variable:
    """A value that changes as the kernel runs: assign to `.value`. It lives in a register."""

    def __init__(self, emitter: Emitter, start: Value) -> None:
        self.emitter, self._element = emitter, start.element
        with emitter.builder.goto_entry_block():
            self._slot = emitter.builder.alloca(start.llvm.type)
        self._type = start.llvm.type
        self.value = start

    @property
    def value(self) -> Value:
        loaded = self.emitter.builder.load(self._slot, typ=self._type)
        return Value(self.emitter, loaded, self._element)

    @value.setter
    def value(self, new: Any) -> None:
        self.emitter.builder.store(self.emitter.value(new, self._type).llvm, self._slot)
