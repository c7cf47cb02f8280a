"""`nhwc --version`: what it found on this machine, with which a bug report should begin."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from .. import __version__
from .._bench.engines import ENGINES
from ..errors import InputError
from ..kernels import unavailable
from ..machine.cache import why_unsafe
from ..machine.environment import Environment, cache_dir
from ..shown import shown

_PACKAGES = ("numpy", "numba", "llvmlite")
_MODELS = ("torchvision", "timm")


def version_text() -> str:
    """The versions, the processor, the kernels, the engines that `bench` can race, the cache."""
    here = Environment.here()
    engines = {engine.packages[0]: engine for engine in ENGINES if engine.packages}
    found = [f"{name} {one.version}" for name, one in engines.items() if not one.missing]
    lines = {
        "python": ", ".join([here.python, *_versions(_PACKAGES)]),
        "kernels": _kernels(),
        "models": ", ".join(_versions(_MODELS)) or "neither torchvision nor timm",
        "engines": ", ".join(found) or "none but torch's",
        "cache": _cache(),
    }
    head = f"nhwc {__version__}; {here}"
    return "\n".join([head, *(f"  {name:8} {text}" for name, text in lines.items())])


def _versions(names: tuple[str, ...]) -> list[str]:
    found = []
    for name in names:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found


def _kernels() -> str:
    """The instruction set that kernels are made for, or why there are none."""
    if why := unavailable():
        return f"none: {why}"
    from ..kernels.language.isa import asked, host

    try:
        return f"{host().name}{', as NHWC_ISA asks' if asked() else ''}"
    except InputError as error:
        return f"none: {error}"


def _cache() -> str:
    place = cache_dir()
    try:
        why = why_unsafe(place)
    except FileNotFoundError:
        why = "not made yet"
    except (OSError, ValueError, RuntimeError) as error:
        why = str(error)
    return shown(f"{place}, {why}" if why else str(place))
