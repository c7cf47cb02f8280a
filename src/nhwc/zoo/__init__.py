"""From a name to a model: torchvision, timm, MONAI, `package:callable`, `file.py:callable`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parameter import is_lazy

from ..errors import (
    InputError,
    MissingPackage,
    ModelNotFound,
    NhwcError,
    is_out_of_memory,
    missing,
)
from ..files.container import is_saved
from ..models.kinds import module_of
from ..models.vision import import_torchvision, import_torchvision_if_present
from ..shown import misfit
from .archives import is_safetensors, kind_of
from .monai import monai_builder

_ENDINGS = (".nhwc", ".pt", ".pth", ".pkl", ".ckpt", ".onnx", ".safetensors")

_IS_FOLDER = "{} is a folder. Name a saved model, or file.py:callable."


def load_model(
    name: str,
    *,
    weights: str | Path | None = None,
    seed: int = 0,
    classes: int | None = None,
) -> nn.Module:
    """Build the model called `name`, in eval mode, with random weights unless `weights` is a file.

    The name is `resnet50` or `torchvision:resnet50`, `timm:NAME`, `monai:UNet`,
    `package.module:callable` or `file.py:callable`, whose callable takes no arguments and returns
    the model, or a file that `nhwc.save` wrote. A callable that takes `num_classes`, as
    torchvision's and timm's do, gets `classes` where that is given.

    >>> sum(p.numel() for p in load_model("squeezenet1_1").parameters())
    1235496
    """
    # stdout is for our data, so what packages, files and models print goes to stderr.
    with contextlib.redirect_stdout(sys.stderr):
        builder = find_builder(name)
    if classes is not None and _takes(builder, "num_classes"):
        builder = partial(builder, num_classes=classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = _built(name, builder)
    if not isinstance(made, (nn.Module, ExportedProgram)):
        if inspect.iscoroutine(made):
            made.close()  # else Python adds, in lines of its own, that nobody awaited it
        raise InputError(
            f"{name} returned {type(made).__name__}, not a torch.nn.Module. "
            "Name a callable that takes no arguments and returns the model."
        )
    model = module_of(made, "load")
    if weights is not None:
        load_weights_(model, weights)
    return model.eval()


def _built(name: str, builder: Callable[..., object]) -> object:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return builder()
    except NhwcError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's code raises
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"{name} raised {_said(error, name.rpartition(':')[0])}. "
            "Name a callable that takes no arguments and returns the model."
        ) from error


def _said(error: BaseException, file: str | Path = "") -> str:
    """Kind and words of an error, in one line, and the line of `file` that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == os.path.abspath(file)]
    where = f" ({file}, line {lines[-1]})" if lines else ""
    return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}{where}"


def find_builder(name: str) -> Callable[..., object]:
    """Return the function of no arguments that builds the model called `name`."""
    if is_saved(name):
        from ..files.optimized import load

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


def randomize_batchnorm_(
    model: nn.Module, seed: int = 0, *, inputs: Sequence[Any] = ()
) -> nn.Module:
    """Give every batch norm random statistics and weights: folding the defaults is trivial.

    With `inputs` the statistics are near those of a run on them, as training leaves them. Others
    let numbers grow from layer to layer, until gates are switches and every answer is chance.

    >>> net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
    >>> _ = nn.init.constant_(net[0].weight, 1e6)
    >>> image = torch.rand(1, 3, 8, 8)
    >>> bool((randomize_batchnorm_(net, inputs=[image])(image).abs() < 10).all())
    True
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(like: Tensor, low: float, high: float) -> Tensor:
        drawn = torch.empty(like.shape, device="cpu")
        return drawn.uniform_(low, high, generator=generator).to(like)

    with torch.no_grad():
        for module in model.modules():
            if not isinstance(module, _BatchNorm):
                continue
            if module.running_mean is not None and module.running_var is not None:
                module.running_mean.copy_(uniform(module.running_mean, -0.2, 0.2))
                module.running_var.copy_(uniform(module.running_var, 0.6, 1.4))
            if module.weight is not None:
                module.weight.copy_(uniform(module.weight, 0.6, 1.4))
            if module.bias is not None:
                module.bias.copy_(uniform(module.bias, -0.2, 0.2))
    if inputs:
        _bring_near(model, inputs)
    return model


def _bring_near(model: nn.Module, inputs: Sequence[Any]) -> None:
    """Take the statistics of batch norms as factors of those that a run on `inputs` has."""

    def measure(norm: Any, given: tuple[Any, ...]) -> None:
        hooks.pop(norm).remove()  # A norm that is called again stays as it was the first time.
        x = given[0].transpose(0, 1).flatten(1).float()
        if x.shape[1] > 1:
            variance, mean = torch.var_mean(x, 1, correction=0)
            spread = torch.where(variance > 0, variance, 1.0)
            norm.running_mean.mul_(spread.sqrt()).add_(mean)
            norm.running_var.mul_(spread)

    hooks = {
        module: module.register_forward_pre_hook(measure)
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }
    try:
        with torch.no_grad():
            model(*inputs)
    finally:
        for hook in hooks.values():
            hook.remove()


def randomize_constants_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Fill parameters that hold a single number with different ones, so that errors show.

    A head of zeros answers zero whatever precedes it, and a layer scale of a millionth hides its
    layer.

    >>> layer = nn.Linear(4, 4)
    >>> _ = nn.init.zeros_(layer.weight)
    >>> bool(randomize_constants_(layer).weight.any())
    True
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            lazy = is_lazy(parameter)
            if lazy or parameter.numel() < 2 or (parameter != parameter.flatten()[0]).any():
                continue
            drawn = torch.empty(parameter.shape, device="cpu")
            drawn.uniform_(-1.0, 1.0, generator=generator)
            if parameter.ndim > 1:
                drawn *= (len(parameter) / parameter.numel()) ** 0.5
            elif parameter[0].abs() > 0.5:
                drawn = parameter[0].cpu() * (1.0 + 0.4 * drawn)
            else:
                drawn *= 0.2
            parameter.copy_(drawn)
    return model


def load_weights_(model: nn.Module, path: str | Path) -> nn.Module:
    """Load a state dict from a file into the model."""
    state = read_weights(path)
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if isinstance(state, dict):
        _unwrap_(state, model)
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"{path} does not fit the model: {misfit(error)} Give weights of this very model."
        ) from error
    return model


def read_weights(path: str | Path) -> Any:
    """Read what a file of weights holds: only tensors and plain containers, never code.

    The file is one that `torch.save` wrote, or one of safetensors.
    """
    try:
        return _read_weights(path)
    except FileNotFoundError:
        raise InputError(f"no such weights file: {path}") from None
    except MissingPackage:
        raise
    except Exception as error:  # a damaged file makes the unpickler raise anything
        if is_out_of_memory(error):
            raise
        raise InputError(_why_no_weights(Path(path))) from error


def _unwrap_(state: dict[str, Any], model: nn.Module) -> None:
    """Drop what DistributedDataParallel and torch.compile write before the names of weights."""
    for wrapper in ("module", "_orig_mod", "module"):  # Either may wrap the other.
        all_wrapped = all(str(name).startswith(f"{wrapper}.") for name in state)
        if all_wrapped and not hasattr(model, wrapper):
            consume_prefix_in_state_dict_if_present(state, f"{wrapper}.")


def _read_weights(path: str | Path) -> Any:
    if not is_safetensors(path):
        with warnings.catch_warnings():
            # Torch warns of a TorchScript archive, which it then refuses.
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    try:
        from safetensors.torch import load_file
    except ModuleNotFoundError:
        raise missing("safetensors", "zoo") from None
    return load_file(path)


def _why_no_weights(path: Path) -> str:
    if path.is_dir():
        return f"{path} is a folder. Name the file of weights in it."
    if is_saved(path):
        return f"{path} is a model with its weights, saved by nhwc. Name it in place of the model."
    kind = kind_of(path)
    if is_safetensors(path):
        return f"{path} is a damaged file of safetensors. Copy it again."
    what = f" ({kind.what})" if kind.is_known else ""
    return (
        f"{path} is no file of plain tensors{what}. "
        "Save it with torch.save(model.state_dict(), ...)."
    )


def _bare_name(name: str) -> Callable[..., object]:
    if name.endswith(".py"):
        raise ModelNotFound(f"{name} names a file. Add the callable: {name}:NAME.")
    if Path(name).is_file():
        kind = kind_of(name)
        raise ModelNotFound(f"{name} is {kind.what}: {kind.todo}.")
    if len(Path(name).parts) > 1 and Path(name).is_dir():
        raise ModelNotFound(_IS_FOLDER.format(name))
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
    import_torchvision_if_present()
    try:
        import timm
    except ModuleNotFoundError as error:
        # The missing package may be one that timm needs: the extra brings them all.
        raise missing(str(error.name).partition(".")[0], "zoo") from None
    except ImportError as error:
        raise MissingPackage(
            f"timm cannot be imported ({_said(error)}): pip install --upgrade 'nhwc[zoo]'."
        ) from error
    if not timm.is_model(name):
        raise ModelNotFound(f"timm has no {name!r}{_nearest(name, timm.list_models())}")
    return partial(timm.create_model, name, pretrained=False)


def _takes(builder: Callable[..., object], name: str) -> bool:
    try:
        parameters = inspect.signature(builder).parameters
    except ValueError:  # Some that are written in C have none.
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _nearest(name: str, names: list[str]) -> str:
    import difflib

    near = difflib.get_close_matches(name, names, n=3)
    return f"; did you mean {', '.join(near)}?" if near else "."


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ModelNotFound(f"no such file: {path}. Give the path of a Python file and a callable.")
    import_torchvision_if_present()
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
        raise ModelNotFound(f"{path} could not be run: {_said(error, path)}.") from error
    finally:
        sys.path.remove(beside)
        if beside not in sys.path:
            sys.path.append(beside)
    return module


def _from_package(name: str) -> ModuleType:
    import_torchvision_if_present()
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        if is_out_of_memory(error):
            raise
        raise ModelNotFound(f"cannot import {name!r}: {_said(error)}.") from error
