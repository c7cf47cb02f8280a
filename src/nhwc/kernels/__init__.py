"""Float32 kernels on channels-last data, generated through LLVM.

    >>> from nhwc import kernels
    >>> spec = kernels.ConvSpec(1, 64, 56, 56, 64, 3, 3, padding=(1, 1))
    >>> [kernel.name for kernel in kernels.conv2d_candidates(spec)]
    ['direct', 'winograd4x4', 'winograd2x2', 'winograd4x4lean']

They are compiled on first use, by the compiler that numba brings, and kept on disk.
`docs/kernels.md` explains how they work, floor by floor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .convolutions.conv import ConvKernel as ConvKernel
    from .convolutions.conv import conv2d_candidates as conv2d_candidates
    from .convolutions.spec import ConvSpec as ConvSpec
    from .layers.activations import Activation as Activation
    from .layers.elementwise import activation_step as activation_step
    from .operators.layers import register as register
    from .programs.builder import Builder as Builder
    from .programs.pool import Pool as Pool
    from .programs.program import Program as Program

_HOMES = {
    "Activation": "layers.activations",
    "Builder": "programs.builder",
    "ConvKernel": "convolutions.conv",
    "activation_step": "layers.elementwise",
    "conv2d": "operators.conv2d",
    "conv2d_candidates": "convolutions.conv",
    "ConvSpec": "convolutions.spec",
    "Pool": "programs.pool",
    "Program": "programs.program",
    "register": "operators.layers",
}


def __getattr__(name: str) -> Any:
    # The compiler is loaded only by who wants a kernel.
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


@cache
def unavailable() -> str | None:
    """Why the kernels cannot be used here, or None if they can."""
    try:
        import llvmlite.binding as llvm
    except ImportError:
        return "llvmlite, which comes with numba, is not installed: pip install numba"
    try:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
    except RuntimeError as error:
        return f"LLVM has no code generator for this processor: {error}"
    return None


def available() -> bool:
    """Whether the kernels can be used here; `unavailable` says why not."""
    return unavailable() is None


def prepare(progress: Callable[[str, int, int], None] | None = None) -> None:
    """Compile all convolution kernels, or load them from disk, so that no later call has to wait.

    `progress(name, done, total)` is called before each.
    """
    from .convolutions.conv import all_kernels
    from .operators.conv2d import register
    from .tape.threads import ENTRY
    from .tape.walk import WALK
    from .tape.words import COMPARE

    register()
    kernels = (*all_kernels(), WALK, ENTRY, COMPARE)
    ordered = sorted(kernels, key=lambda kernel: kernel.name)
    for done, kernel in enumerate(ordered):
        if progress:
            progress(kernel.name, done, len(ordered))
        _ = kernel.address
