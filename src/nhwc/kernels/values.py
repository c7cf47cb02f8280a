"""The values of the kernel language: what Python expressions in a kernel stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir

if TYPE_CHECKING:
    from .vectors import Emitter

INT = ir.IntType(64)
WORD = ir.IntType(32)
FLOAT = ir.FloatType()
POINTER = ir.PointerType()


class Value:
    """An int64, float32, vector, mask or pointer that the compiled kernel will hold.

    Operators work on two of a kind; a Python number and a scalar beside a vector are widened.
    Division of integers truncates. A pointer plus n is the address of its n-th element.
    """

    __slots__ = ("element", "emitter", "llvm")

    def __init__(self, emitter: Emitter, llvm: ir.Value, element: ir.Type | None = None) -> None:
        self.emitter, self.llvm, self.element = emitter, llvm, element

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
        return Value(self.emitter, self.emitter.builder.ptrtoint(self.llvm, INT))

    def _pointer(self, element: ir.Type) -> Value:
        pointer = self.llvm
        if pointer.type != POINTER:
            pointer = self.emitter.builder.inttoptr(pointer, POINTER)
        return Value(self.emitter, pointer, element)

    def __add__(self, other: Any) -> Value:
        if self.element is None:
            return self._binary(other, "add", "fadd")
        index = self.emitter.value(other, INT).llvm
        moved = self.emitter.builder.gep(self.llvm, [index], source_etype=self.element)
        return Value(self.emitter, moved, self.element)

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
        return self.emitter.value(other, self.llvm.type) - self

    def __rtruediv__(self, other: Any) -> Value:
        return self.emitter.value(other, self.llvm.type) / self

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
        left, right = self.emitter.alike(self, other)
        return self._emit(floating if left.is_float else integer, left.llvm, right.llvm)

    def _compare(self, other: Any, relation: str) -> Value:
        left, right = self.emitter.alike(self, other)
        if not left.is_float:
            return self._emit("icmp_signed", relation, left.llvm, right.llvm)
        kind = "fcmp_unordered" if relation == "!=" else "fcmp_ordered"
        return self._emit(kind, relation, left.llvm, right.llvm)

    def _emit(self, instruction: str, *operands: Any) -> Value:
        return Value(self.emitter, getattr(self.emitter.builder, instruction)(*operands))


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
