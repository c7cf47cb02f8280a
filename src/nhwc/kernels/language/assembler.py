"""From LLVM's assembly to object code, in a process of its own.

What LLVM takes when it compiles, and keeps of it for as long as the process lives, is as much as a
small model. So it goes with a process: this file is the program that runs there, and needs nothing
but llvmlite.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

_PATIENCE_S = 120


def object_code(assembly: str, features: str) -> bytes:
    """Compile `assembly` for this machine, with `features` of its processor."""
    return _compiled_elsewhere(assembly, features) or _compiled(assembly, features)


def machine(features: str) -> Any:
    """LLVM's description of what to generate code for."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=features,
        opt=2,
        reloc="pic",
        codemodel="jitdefault",
        jit=True,
    )


def _compiled_elsewhere(assembly: str, features: str) -> bytes | None:
    """None where no other process can do it: where Python is part of some other program, say."""
    python = sys.executable or ""
    if "python" not in Path(python).name.lower() or getattr(sys, "frozen", False):
        return None
    command = [python, "-I", __file__, features, *sys.path]
    try:
        done = subprocess.run(
            command, input=assembly.encode(), capture_output=True, timeout=_PATIENCE_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _compiled(assembly: str, features: str) -> bytes:
    target = machine(features)
    return bytes(target.emit_object(optimized(assembly, target)))


def optimized(assembly: str, target: Any) -> Any:
    """The module that `assembly` describes, as `target`, a machine, is to get it."""
    import llvmlite.binding as llvm

    module = llvm.parse_assembly(assembly)
    module.verify()
    module.triple = target.triple
    options = llvm.PipelineTuningOptions(speed_level=2)
    # The kernels are written vectorised and unrolled, so LLVM must not do it again.
    options.loop_vectorization = options.slp_vectorization = False
    options.loop_unrolling = options.loop_interleaving = False
    passes = llvm.create_pass_builder(target, options)
    passes.getModulePassManager().run(module, passes)
    return module


if __name__ == "__main__":
    sys.path = sys.argv[2:]
    sys.stdout.buffer.write(_compiled(sys.stdin.buffer.read().decode(), sys.argv[1]))
