"""The values of the kernel language: what Python expressions in a kernel stand for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from llvmlite import ir

INT = ir.IntType(64)
WORD = ir.IntType(32)
FLOAT = ir.FloatType()
POINTER = ir.PointerType()


class Value:
    """An int64, float32, vector, mask or pointer that the compiled kernel will hold.

    Operators work on two of a kind; a Python number and a scalar beside a vector are widened.
    Division of integers truncates. A pointer plus n is the address of its n-th element.
    """

    __slots__ = ("element", "llvm", "writer")

    def __init__(self, writer: Writer, llvm: ir.Value, element: ir.Type | None = None) -> None:
        self.writer, self.llvm, self.element = writer, llvm, element

    @property
    def is_float(self) -> bool:
        kind = self.llvm.type
        return bool((kind.element if isinstance(kind, ir.VectorType) else kind) == FLOAT)

    def floats(self) -> Value:
        """This address as a pointer to float32."""
        return self._pointer(FLOAT)

    def integers(self) -> Value:
        """This address as a pointer to int64."""
        return self._pointer(INT)

    def address(self) -> Value:
        """This pointer as an integer, to be kept in memory."""
        return Value(self.writer, self.writer.builder.ptrtoint(self.llvm, INT))

    def _pointer(self, element: ir.Type) -> Value:
        pointer = self.llvm
        if pointer.type != POINTER:
            pointer = self.writer.builder.inttoptr(pointer, POINTER)
        return Value(self.writer, pointer, element)

    def __add__(self, other: Any) -> Value:
        if self.element is None:
            return self._binary(other, "add", "fadd")
        index = self.writer.value(other, INT).llvm
        moved = self.writer.builder.gep(self.llvm, [index], source_etype=self.element)
        return Value(self.writer, moved, self.element)

    def __sub__(self, other: Any) -> Value:
        return self._binary(other, "sub", "fsub")

    def __mul__(self, other: Any) -> Value:
        return self._binary(other, "mul", "fmul")

    def __floordiv__(self, other: Any) -> Value:
        return self._binary(other, "sdiv", "")

    def __truediv__(self, other: Any) -> Value:
        return self._binary(other, "", "fdiv")

    def __mod__(self, other: Any) -> Value:
        return self._binary(other, "srem", "")

    def __rsub__(self, other: Any) -> Value:
        return self.writer.value(other, self.llvm.type) - self

    def __rtruediv__(self, other: Any) -> Value:
        return self.writer.value(other, self.llvm.type) / self

    __radd__ = __add__
    __rmul__ = __mul__

    def __and__(self, other: Any) -> Value:
        return self._binary(other, "and_", "")

    def __or__(self, other: Any) -> Value:
        return self._binary(other, "or_", "")

    def __invert__(self) -> Value:
        return self._emit("not_", self.llvm)

    def __lshift__(self, other: Any) -> Value:
        return self._binary(other, "shl", "")

    def __neg__(self) -> Value:
        return 0 - self if not self.is_float else self._emit("fneg", self.llvm)

    def __lt__(self, other: Any) -> Value:
        return self._compare(other, "<")

    def __le__(self, other: Any) -> Value:
        return self._compare(other, "<=")

    def __gt__(self, other: Any) -> Value:
        return self._compare(other, ">")

    def __ge__(self, other: Any) -> Value:
        return self._compare(other, ">=")

    def __eq__(self, other: Any) -> Value:  # type: ignore[override]
        return self._compare(other, "==")

    def __ne__(self, other: Any) -> Value:  # type: ignore[override]
        return self._compare(other, "!=")

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise TypeError("a Value is known only to the compiled kernel; branch with Emitter.when")

    def _binary(self, other: Any, integer: str, floating: str) -> Value:
        left, right = self.writer.alike(self, other)
        return self._emit(floating if left.is_float else integer, left.llvm, right.llvm)

    def _compare(self, other: Any, relation: str) -> Value:
        left, right = self.writer.alike(self, other)
        if not left.is_float:
            return self._emit("icmp_signed", relation, left.llvm, right.llvm)
        kind = "fcmp_unordered" if relation == "!=" else "fcmp_ordered"
        return self._emit(kind, relation, left.llvm, right.llvm)

    def _emit(self, instruction: str, *operands: Any) -> Value:
        return Value(self.writer, getattr(self.writer.builder, instruction)(*operands))


def constant(kind: ir.Type, number: float) -> ir.Constant:
    """A number of this LLVM type, in every lane if it is a vector's."""
    return _constant(kind, number, math.copysign(1.0, number))


@lru_cache(1024)
def _constant(kind: ir.Type, number: float, sign: float) -> ir.Constant:
    del sign  # 0.0 and -0.0 are equal, and two constants
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


class Writer:
    """Writes the instructions of one function, and brings the operands of each to one kind.

    `width` is how many floats a vector has.
    """

    def __init__(self, builder: ir.IRBuilder, width: int) -> None:
        self.builder, self.width = builder, width
        self.vector_type = ir.VectorType(FLOAT, width)

    def i64(self, number: int) -> Value:
        return Value(self, constant(INT, number))

    def f32(self, number: float) -> Value:
        return Value(self, constant(FLOAT, number))

    def vector(self, number: float = 0.0) -> Value:
        return Value(self, constant(self.vector_type, number))

    def value(self, number: Any, kind: ir.Type) -> Value:
        """`number`, a Value or a Python number, as a Value of this LLVM type."""
        if isinstance(number, Value):
            widen = isinstance(kind, ir.VectorType) and number.llvm.type == FLOAT
            return self.broadcast(number) if widen else number
        return Value(self, constant(kind, number))

    def alike(self, left: Any, right: Any) -> tuple[Value, Value]:
        """Return both as Values of the wider of their types."""
        kinds = [v.llvm.type for v in (left, right) if isinstance(v, Value)]
        kind = next((k for k in kinds if isinstance(k, ir.VectorType)), kinds[0])
        return self.value(left, kind), self.value(right, kind)

    def broadcast(self, scalar: Value) -> Value:
        """A vector with `scalar`, a float, in every lane."""
        return Value(self, self._splat(scalar.llvm, self.width))

    def _splat(self, scalar: ir.Value, count: int) -> ir.Value:
        undefined = ir.Constant(ir.VectorType(scalar.type, count), ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, constant(WORD, 0))
        lanes = constant(ir.VectorType(WORD, count), 0)
        return self.builder.shuffle_vector(first, undefined, lanes)

    def shuffle(self, vector: Value, lanes: Sequence[int], other: Value | None = None) -> Value:
        """The lanes with these numbers, known while Python runs, of `vector` and then `other`."""
        numbers = ir.Constant(ir.VectorType(WORD, len(lanes)), list(lanes))
        behind = vector if other is None else other
        chosen = self.builder.shuffle_vector(vector.llvm, behind.llvm, numbers)
        return Value(self, chosen)

    def float_of_bits(self, number: Value) -> Value:
        """The float32 whose bits are the low half of an int64: how floats travel in arguments."""
        low = self.builder.trunc(number.llvm, WORD)
        return Value(self, self.builder.bitcast(low, FLOAT))

    def to_float(self, number: Value) -> Value:
        """An int64 as a float32."""
        return Value(self, self.builder.sitofp(number.llvm, FLOAT))

    def whole(self, number: Value) -> Value:
        """A float32 without what is behind its point, as an int64."""
        return Value(self, self.builder.fptosi(number.llvm, INT))

    def lanes(self, count: Any) -> Value:
        """The mask of the first `count` lanes."""
        every = self._splat(self.builder.trunc(self.value(count, INT).llvm, WORD), self.width)
        numbers = ir.Constant(every.type, list(range(self.width)))
        return Value(self, self.builder.icmp_signed("<", numbers, every))
