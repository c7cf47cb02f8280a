"""The instruction sets that kernels are generated for, and the one this process uses."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

from ...errors import InputError


@dataclass(frozen=True)
class Isa:
    """The vectors of a processor: how wide they are, how many registers hold them, and their use.

    `rows` and `vectors` are the tile of the matrix product: rows x vectors accumulators, the
    vectors of one weight row and one broadcast must fit into the registers. The last columns of a
    product may take a vector of `least` lanes: half a wide one is half the work for some. A tile
    is `tight` if LLVM must be held to reading one factor at a time.

    >>> AVX2.width, AVX2.rows * AVX2.vectors + AVX2.vectors + 1 <= AVX2.registers
    (8, True)
    """

    name: str
    width: int
    registers: int
    rows: int
    vectors: int
    least: int
    fma: bool
    needs: tuple[str, ...]
    without: tuple[str, ...] = ()
    tight: bool = False

    @property
    def panel_columns(self) -> int:
        """How many columns of a product a tile has, and so a panel of weights."""
        return self.vectors * self.width

    def panels(self, columns: int) -> int:
        """How many panels hold `columns` of a product."""
        return -(-columns // self.panel_columns)

    def padded(self, channels: int) -> int:
        """`channels`, filled up to whole vectors.

        >>> AVX2.padded(9)
        16
        """
        return -(-channels // self.width) * self.width


AVX512 = Isa("avx512", 16, 32, 14, 2, 8, True, ("avx512f", "avx512vl", "fma"))
AVX2 = Isa("avx2", 8, 16, 6, 2, 8, True, ("avx2", "fma"), ("avx512",), tight=True)
NEON = Isa("neon", 4, 32, 8, 3, 4, True, ("neon",), tight=True)
PLAIN = Isa("plain", 4, 16, 4, 2, 4, False, (), ("avx", "fma", "xop"))
"""Four floats at a time, which every 64-bit processor has in some form."""

ALL = (AVX512, AVX2, NEON, PLAIN)


def host() -> Isa:
    """Return the widest instruction set of this machine, or the one that `NHWC_ISA` names.

    >>> host() in ALL
    True
    """
    return _choose(asked())


def asked() -> str:
    """The instruction set that `NHWC_ISA` names, if it does."""
    return os.environ.get("NHWC_ISA", "")


@cache
def _choose(wanted: str) -> Isa:
    features = host_features()
    usable = [isa for isa in ALL if all(features.get(need) for need in isa.needs)]
    for isa in usable:
        if wanted in ("", isa.name):
            return isa
    names = ", ".join(isa.name for isa in usable)
    raise InputError(
        f"NHWC_ISA={wanted} is not one that this machine can run. It can run: {names}."
    )


@cache
def host_features() -> dict[str, bool]:
    """The features that LLVM finds in this processor, by LLVM's names."""
    import llvmlite.binding as llvm

    return dict(llvm.get_host_cpu_features())


def target_features(isa: Isa) -> str:
    """LLVM's feature string for code that stays within `isa` on this machine."""
    signs = []
    for name, present in sorted(host_features().items()):
        allowed = present and not name.startswith(isa.without)
        signs.append(("+" if allowed else "-") + name)
    return ",".join(signs)
