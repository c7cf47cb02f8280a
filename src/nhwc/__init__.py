"""nhwc: the memory format of PyTorch vision models, visible, fast and proven.

Its names are imported when the first of them is used: importing torch takes seconds, and the
command line answers `--help` and Ctrl-C before that.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__ as __version__

if TYPE_CHECKING:
    from ._public import *

__all__ = [
    "Audit",
    "Drawing",
    "Environment",
    "FileError",
    "Finding",
    "Format",
    "FormatLost",
    "InputError",
    "MissingPackage",
    "ModelFailed",
    "ModelNotFound",
    "NhwcError",
    "ProcessLost",
    "VerificationError",
    "audit",
    "backend",
    "bench",
    "convert_",
    "format_of",
    "fuse",
    "load",
    "load_model",
    "ops",
    "optimize",
    "save",
    "show",
    "strict",
    "to_format",
    "train",
]


_MODULES = ("testing", "trainers", "training")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    public = importlib.import_module(f"{__name__}._public")
    globals().update({known: getattr(public, known) for known in __all__})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
