"""Where a name leads: a package's builder, a callable of a file or of a package, a saved model."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ..errors import MissingPackage, ModelNotFound, is_out_of_memory, missing
from ..files.container import is_saved
from ..models.vision import import_torchvision, mend_torchvision
from .archives import kind_of
from .monai import monai_builder

_ENDINGS = (".nhwc", ".pt", ".pth", ".pkl", ".ckpt", ".onnx", ".safetensors")

_IS_FOLDER = "{} is a folder. Name a saved model, or file.py:callable."


def said(error: BaseException, file: str | Path = "") -> str:
    """Kind and words of an error, in one line, and the line of `file` that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == os.path.abspath(file)]
    where = f" ({file}, line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}{where}"


def find_builder(name: str) -> Callable[..., object]:
    """Return the function of no arguments that builds the model called `name`."""
    if is_saved(name):
        from ..files.loading import load

        return lambda: load(name)
    if ":" not in name:
        return _bare_name(name)
    where, what = _parts(name)
    if where == "torchvision":
        return _from_torchvision(what)
    if where == "timm":
        return _from_timm(what)
    if where == "monai":
        return monai_builder(what)
    found = find_object(name)
    return (lambda: found) if isinstance(found, nn.Module) else found


def find_object(name: str) -> Callable[..., Any]:
    """Return what `file.py:callable` or `package.module:callable` names."""
    where, what = _parts(name)
    module = _from_file(Path(where)) if where.endswith(".py") else _from_package(where)
    found = getattr(module, what, None)
    if found is None and getattr(module, "__file__", None) is None and Path(where).is_dir():
        raise ModelNotFound(f"{where} is a folder. Name a file in it: {where}/FILE.py:{what}.")
    if not callable(found):
        raise ModelNotFound(f"{where} has no callable {what!r}. Check the part after the colon.")
    return found  # type: ignore[no-any-return]


def _parts(name: str) -> tuple[str, str]:
    where, _, what = name.rpartition(":")
    if not where or not what:
        side = "after" if where else "before"
        raise ModelNotFound(
            f"{name!r} has nothing {side} its colon. Write torchvision:NAME, timm:NAME, "
            "package.module:callable or file.py:callable."
        )
    return where, what


def _bare_name(name: str) -> Callable[..., object]:
    if name.endswith(".py"):
        raise ModelNotFound(f"{name} names a file. Add the callable: {name}:NAME.")
    if Path(name).is_file():
        kind = kind_of(name)
        raise ModelNotFound(f"{name} is {kind.what}: {kind.todo}.")
    if len(Path(name).parts) > 1 and Path(name).is_dir():
        raise ModelNotFound(_IS_FOLDER.format(name))
    if len(Path(name).parts) > 1 and Path(name).exists():
        raise ModelNotFound(f"{name} is no file. Name a saved model, or file.py:callable.")
    if Path(name).suffix in _ENDINGS or len(Path(name).parts) > 1:
        raise ModelNotFound(f"no such file: {name}.")
    reasons: list[str] = []
    absent: list[MissingPackage] = []
    for source in (_from_torchvision, _from_timm):
        try:
            return source(name)
        except ModelNotFound as error:
            reasons.append(str(error))
        except MissingPackage as error:
            absent.append(error)
    if not reasons:
        raise absent[0]
    if name and Path(name).is_dir():
        raise ModelNotFound(_IS_FOLDER.format(name))
    raise ModelNotFound(f"no model named {name!r}: " + " ".join([*reasons, *map(str, absent)]))


def _from_torchvision(name: str) -> Callable[..., object]:
    models = import_torchvision().models
    try:
        builder = models.get_model_builder(name)
    except ValueError:
        raise ModelNotFound(
            f"torchvision has no {name!r}{_nearest(name, models.list_models())}"
        ) from None
    takes = inspect.signature(builder).parameters
    nothing = {key: None for key in ("weights", "weights_backbone") if key in takes}
    # These two draw truncated normals for most of their construction, which is needless here.
    quick = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    return partial(builder, **nothing, **quick)


def _from_timm(name: str) -> Callable[..., object]:
    mend_torchvision()
    try:
        import timm
    except ModuleNotFoundError as error:
        # The missing package may be one that timm needs: the extra brings them all.
        raise missing(str(error.name).partition(".")[0], "zoo") from None
    except ImportError as error:
        raise MissingPackage(
            f"timm cannot be imported ({said(error)}): pip install --upgrade 'nhwc[zoo]'."
        ) from error
    if not timm.is_model(name):
        raise ModelNotFound(f"timm has no {name!r}{_nearest(name, timm.list_models())}")
    return partial(timm.create_model, name, pretrained=False)


def _nearest(name: str, names: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, names, n=3)
    return f"; did you mean {', '.join(near)}?" if near else "."


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ModelNotFound(f"no such file: {path}. Give the path of a Python file and a callable.")
    mend_torchvision()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickling look a class's module up by name while the file still runs.
    sys.modules.setdefault(path.stem, module)
    # As Python does for a script: its code may import its neighbours later, too.
    beside = str(path.parent.resolve())
    sys.path.insert(0, beside)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        raise ModelNotFound(f"{path} could not be run: {said(error, path)}.") from error
    finally:
        sys.path.remove(beside)
        if beside not in sys.path:
            sys.path.append(beside)
    return module


def _from_package(name: str) -> ModuleType:
    mend_torchvision()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        raise ModelNotFound(f"cannot import {name!r}: {said(error)}.") from error
