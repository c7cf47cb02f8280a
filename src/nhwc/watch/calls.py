"""One operator call: what went in, what came out, where in the user's code, and what it copied."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from ..formats import Format


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that went into or came out of an operator."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    format: Format
    bytes: int
    source: int | None
    """The call that filled its memory; -1 where it was there before; None for the model's own
    parameters and buffers, and for gradients of parameters."""

    @property
    def densest(self) -> int | None:
        """The dimension that is densest in memory; None where the strides leave it open."""
        dims = [d for d, step in enumerate(self.strides) if step > 0 and self.shape[d] > 1]
        if self.format is Format.AMBIGUOUS or len(dims) < 2:
            return None
        return min(dims, key=lambda d: (self.strides[d], -d))

    @property
    def spread(self) -> bool:
        """Whether one number stands for several, side by side."""
        return any(
            step == 0 and size > 1 for step, size in zip(self.strides, self.shape, strict=True)
        )

    @property
    def marked(self) -> bool:
        """Whether torch takes it for channels last; torch reads the stride even of a batch of one.

        One image that views made from a sequence of tokens has dense channels and an arbitrary
        batch stride. Operators that ask how to lay out their result take it for contiguous.
        """
        low = 0
        for dim in (1, *range(len(self.shape) - 1, 1, -1), 0):
            step = self.strides[dim]
            if step < low or step == 0 or (dim == 0 and step == self.strides[1]):
                return False
            low = step * self.shape[dim]
        return True


def described(specs: Iterable[TensorSpec]) -> str:
    """Shape, strides, format and type of each tensor, in one line."""
    return "; ".join(f"shape {s.shape} strides {s.strides} ({s.format}) {s.dtype}" for s in specs)


@dataclass(frozen=True)
class CallSite:
    """Where in the user's code an operator was called, and in which module."""

    module: str
    module_type: str
    file: str
    line: int
    source: str

    @property
    def words(self) -> str:
        """Line and module, as they follow the name of an operator in a sentence."""
        where = f"{self.file}:{self.line}" if self.file else "an unknown line"
        name = f"module {self.module}" if self.module else "the model"
        return f"at {where} in {name} ({self.module_type})" if self.module_type else f"at {where}"

    @property
    def place(self) -> str:
        """File and line, short: from the package on, or from the working directory on."""
        if not self.file:
            return "(no source line)"
        if cell := _cell(self.file):
            return f"{cell}:{self.line}"
        packaged = re.split(r"(?:site|dist)-packages[/\\]", self.file)
        short = packaged[-1] if len(packaged) > 1 else os.path.relpath(self.file)
        return f"{self.file if short.startswith('..') else short}:{self.line}"


def _cell(file: str) -> str:
    """The name of the notebook's cell that IPython keeps under the name of a file, `In[3]` say."""
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive else None
    label = getattr(getattr(shell, "compile", None), "format_code_name", lambda file: None)(file)
    return label[1] if label else ""


@dataclass(frozen=True)
class Copy:
    """A copy inside an operator's kernel that changed the layout of what it copied."""

    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Call:
    """One operator call as the user's code made it, or one operator of the backward pass."""

    index: int
    operator: str
    backward: bool
    site: CallSite
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    moves_data: bool
    """False for a view, whose output lies in the memory of an input."""
    seconds: float = 0.0
    copies: tuple[Copy, ...] = ()
    asked: Format | None = None
    """The memory format that the code named in the call."""

    @property
    def copied_bytes(self) -> int:
        return sum(copy.bytes for copy in self.copies)

    @property
    def copy_seconds(self) -> float:
        return sum(copy.seconds for copy in self.copies)
