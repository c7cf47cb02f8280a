"""The ways to run a model that are compared, one file each."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import InputError
from .channels_last import ENGINE as CHANNELS_LAST
from .compiled import ENGINE as COMPILED
from .compiled_frozen import ENGINE as COMPILED_FROZEN
from .eager import ENGINE as EAGER
from .engine import Engine as Engine
from .executorch import ENGINE as EXECUTORCH
from .fused import ENGINE as FUSED
from .fused_nchw import ENGINE as FUSED_NCHW
from .fused_script import ENGINE as FUSED_SCRIPT
from .fx import ENGINE as FX
from .jit import ENGINE as JIT
from .litert import ENGINE as LITERT
from .mnn import ENGINE as MNN
from .ncnn import ENGINE as NCNN
from .onnxruntime import ENGINE as ONNXRUNTIME
from .onnxruntime_offline import ENGINE as ONNXRUNTIME_OFFLINE
from .opencv import ENGINE as OPENCV
from .openvino import ENGINE as OPENVINO
from .optimized import ENGINE as OPTIMIZED
from .zentorch import ENGINE as ZENTORCH

ENGINES = (
    EAGER,
    CHANNELS_LAST,
    FUSED_NCHW,
    FUSED_SCRIPT,
    FUSED,
    OPTIMIZED,
    JIT,
    FX,
    COMPILED,
    COMPILED_FROZEN,
    ZENTORCH,
    ONNXRUNTIME,
    ONNXRUNTIME_OFFLINE,
    OPENVINO,
    OPENCV,
    NCNN,
    MNN,
    EXECUTORCH,
    LITERT,
)

QUICK = ("eager", "channels_last", "fused", "optimized", "onnxruntime", "openvino")
"""The engines compared by default: each needs at most a few seconds."""

ALL = "all"
"""Stands for every engine that is installed."""


def find_engine(name: str) -> Engine:
    """Return the engine called `name`.

    >>> find_engine("eager").label
    'eager NCHW'
    """
    for engine in ENGINES:
        if engine.name == name:
            return engine
    raise InputError(f"no variant is called {name!r}. {_there_are()}")


def chosen(names: str | Sequence[str]) -> tuple[str, ...]:
    """Return each variant once, in the order given; "all" stands for every installed engine.

    >>> chosen(["jit", "eager", "jit"])
    ('jit', 'eager')
    >>> chosen("all")[:2]
    ('eager', 'channels_last')
    """
    names = (names,) if isinstance(names, str) else names
    if not names:
        raise InputError(f"no variant is named. {_there_are()}")
    installed = [engine.name for engine in ENGINES if not engine.missing]
    wanted = (installed if name == ALL else [find_engine(name).name] for name in names)
    return tuple(dict.fromkeys(name for group in wanted for name in group))


def _there_are() -> str:
    return f"There are: {', '.join(engine.name for engine in ENGINES)}."
