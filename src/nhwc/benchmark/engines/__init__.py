"""The ways to run a model that are compared, one file each."""

from __future__ import annotations

from ...errors import InputError
from .channels_last import ENGINE as CHANNELS_LAST
from .compiled import ENGINE as COMPILED
from .compiled_frozen import ENGINE as COMPILED_FROZEN
from .eager import ENGINE as EAGER
from .engine import Engine as Engine
from .fused import ENGINE as FUSED
from .fx import ENGINE as FX
from .jit import ENGINE as JIT
from .onnxruntime import ENGINE as ONNXRUNTIME
from .openvino import ENGINE as OPENVINO
from .optimized import ENGINE as OPTIMIZED

ENGINES = (
    EAGER,
    CHANNELS_LAST,
    FUSED,
    OPTIMIZED,
    JIT,
    FX,
    COMPILED,
    COMPILED_FROZEN,
    ONNXRUNTIME,
    OPENVINO,
)

QUICK = ("eager", "channels_last", "fused", "optimized", "onnxruntime", "openvino")
"""What is compared unless more is asked for: all but those that compile for many seconds."""


def find_engine(name: str) -> Engine:
    """Return the engine called `name`.

    >>> find_engine("eager").label
    'eager NCHW'
    """
    for engine in ENGINES:
        if engine.name == name:
            return engine
    known = ", ".join(engine.name for engine in ENGINES)
    raise InputError(f"no variant is called {name!r}. There are: {known}.")
