"""From LLVM's assembly to object code: the program of the processes that do it.

It needs nothing but llvmlite. On standard input come requests, each a string of LLVM's features and
the assembly; on standard output goes the object code of each. Before whatever is sent its length
goes, in eight bytes.
"""

from __future__ import annotations

import sys
from typing import IO, Any


def send(to: IO[bytes], *messages: bytes) -> None:
    """Send each of `messages`, with its length before it."""
    for message in messages:
        to.write(len(message).to_bytes(8, "little") + message)
    to.flush()


def receive(source: IO[bytes]) -> bytes | None:
    """The next message; None if there is none, or not all of it."""
    head = source.read(8)
    length = int.from_bytes(head, "little")
    message = source.read(length)
    return message if len(head) == 8 and len(message) == length else None


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


def compiled(assembly: str, features: str) -> bytes:
    """`assembly` compiled for this machine, with `features` of its processor."""
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


def _serve() -> None:
    while (features := receive(sys.stdin.buffer)) is not None:
        assembly = receive(sys.stdin.buffer) or b""
        send(sys.stdout.buffer, compiled(assembly.decode(), features.decode()))


if __name__ == "__main__":
    sys.path = sys.argv[1:]
    _serve()
